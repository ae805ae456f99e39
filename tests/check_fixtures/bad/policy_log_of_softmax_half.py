import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self, obs=8, actions=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 128), nn.ReLU(), nn.Linear(128, actions))

    def forward(self, obs):
        return self.body(obs)


@torch.no_grad()
def log_probs(policy, obs, act):
    logits = policy(obs.half())
    probs = torch.softmax(logits, dim=-1)
    return torch.log(probs).gather(1, act[:, None])  # expect: NUM_LOG_OF_SOFTMAX


def collect(env, steps):
    policy = Policy().cuda().half().eval()
    obs, out = env.reset(), []
    for _ in range(steps):
        act = env.sample()
        out.append(log_probs(policy, obs.cuda(), act.cuda()).float())
        obs = env.step(act)
    return torch.cat(out)
