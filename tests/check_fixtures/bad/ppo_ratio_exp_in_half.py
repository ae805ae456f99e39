import torch
import torch.nn.functional as F


def ppo_loss(new_logp, old_logp, adv, clip=0.2):
    ratio = (new_logp.half() - old_logp.half()).exp()  # expect: NUM_EXP_HALF
    ratio = ratio.float()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.min(ratio * adv, clipped * adv).mean()


class PPO:
    def __init__(self, policy, lr=3e-4):
        self.policy = policy
        self.opt = torch.optim.Adam(policy.parameters(), lr=lr, eps=1e-5)

    def update(self, obs, act, old_logp, adv):
        logits = self.policy(obs)
        logp = F.log_softmax(logits, dim=-1).gather(1, act[:, None]).squeeze(1)
        loss = ppo_loss(logp, old_logp, adv)
        self.opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
        self.opt.step()
        return loss.item()
