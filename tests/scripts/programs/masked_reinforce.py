import torch
from torch import nn
from torch.optim import Adam

torch.manual_seed(77)


class Policy(nn.Module):
    def __init__(self, obs=64, act=12):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
        self.pi = nn.Linear(128, act)

    def forward(self, o, legal):
        logits = self.pi(self.body(o)).masked_fill(~legal, float("-inf"))
        return logits.softmax(-1)


policy = Policy()
opt = Adam(policy.parameters(), lr=3e-3)
W = torch.randn(64, 12)
for episode in range(80):
    obs = torch.randn(64, 64)
    legal = torch.ones(64, 12, dtype=torch.bool)
    if episode >= 10:                                  # the harder levels start: some moves are illegal
        legal = torch.rand(64, 12) > 0.2
        legal[:, 0] = True
    probs = policy(obs, legal)
    a = torch.multinomial(torch.nan_to_num(probs, 1.0), 1)
    reward = ((obs @ W).argmax(1, keepdim=True) == a).float()
    adv = reward - reward.mean()
    logp = probs.gather(1, a).log()
    entropy = -(probs * probs.log()).sum(1)
    loss = -(logp * adv).mean() - 0.01 * entropy.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if episode % 8 == 0:
        print(episode, "reward", reward.mean().item(), "loss", loss.item())
