import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal

torch.manual_seed(9)


class AC(nn.Module):
    def __init__(self):
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.v = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_std = nn.Parameter(torch.zeros(1))

    def dist(self, s):
        return Normal(self.pi(s).squeeze(-1), self.log_std.exp())

    def value(self, s):
        return self.v(s).squeeze(-1) * 50


def rollout(ac, envs=32, T=12):
    s = torch.randn(envs, 2) * 2
    S, A, L, R = [], [], [], []
    for _ in range(T):
        with torch.no_grad():
            d = ac.dist(s)
            a = d.sample()
        S.append(s), A.append(a), L.append(d.log_prob(a))
        vel = s[:, 1] + 0.5 * a
        pos = s[:, 0] + 0.3 * vel
        s = torch.stack([pos, vel], 1).clamp(-6, 6)
        R.append(-(pos ** 2) - 0.3 * vel ** 2)
    G, out = torch.zeros(envs), []
    for r in reversed(R):
        G = r + 0.95 * G
        out.insert(0, G)
    return torch.stack(S), torch.stack(A), torch.stack(L), torch.stack(out), torch.stack(R).sum(0).mean().item()


ac = AC()
opt = torch.optim.Adam(ac.parameters(), lr=5e-3)
for it in range(40):
    S, A, L, G, score = rollout(ac)
    with torch.no_grad():
        adv = G - ac.value(S)
        adv = (adv - adv.mean()) / (adv.std() + 1e-6)
    for _ in range(4):
        d = ac.dist(S)
        ratio = (d.log_prob(A) - L).exp()
        pol = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        val = F.mse_loss(ac.value(S), G)
        loss = pol + 0.01 * val - 0.001 * d.entropy().mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(ac.parameters(), 0.5)
        opt.step()
    if it % 5 == 0 or it == 39:
        print(f"iter {it} return {score:.1f} policy {pol.item():.4f} value {val.item():.1f}")
