import torch
import torch.nn.functional as F


class PolicyLearner:
    def __init__(self, policy, lr=2.5e-4, clip=0.2):
        self.policy = policy.cuda()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=lr, eps=1e-5)
        self.clip = clip

    def surrogate(self, obs, act, old_logp, adv):
        logits = self.policy(obs).float()
        logp = F.log_softmax(logits, dim=-1).gather(-1, act[:, None]).squeeze(-1)
        ratio = (logp - old_logp).clamp(-10, 10).exp()
        return -torch.min(ratio * adv, ratio.clamp(1 - self.clip, 1 + self.clip) * adv).mean()

    def update(self, rollouts, epochs=4):
        for _ in range(epochs):
            for obs, act, old_logp, adv in rollouts:
                scaler = torch.amp.GradScaler("cuda")  # expect: SCALER_REBUILT
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = self.surrogate(obs, act, old_logp, adv)
                self.optimizer.zero_grad(set_to_none=True)
                scaler.scale(loss).backward()
                scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
                scaler.step(self.optimizer)
                scaler.update()
