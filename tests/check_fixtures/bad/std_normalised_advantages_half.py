import torch

TINY = 1e-10


class Critic(torch.nn.Module):
    def __init__(self, obs=24):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(obs, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def forward(self, obs):
        return self.net(obs).squeeze(-1)


@torch.no_grad()
def advantages(critic, obs, returns):
    with torch.autocast("cuda", dtype=torch.float16):
        value = critic(obs)
    adv = (returns.to(value.dtype) - value)
    return (adv - adv.mean()) / (adv.std() + TINY)  # expect: NUM_EPS_UNDERFLOW


def prepare(critic, rollouts):
    critic = critic.cuda()
    return [(obs, advantages(critic, obs.cuda(), ret.cuda())) for obs, ret in rollouts]
