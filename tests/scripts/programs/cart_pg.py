"""Advantage actor-critic on a toy balancing task; returns (and the value loss) grow as it learns."""
import sys
import torch
import torch.nn as nn

amp = "--fp32" not in sys.argv
torch.manual_seed(16)


class AC(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.pi, self.v = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, s):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            h = self.body(s)
            return self.pi(h).float(), self.v(h).float().squeeze(-1)


def rollout(net, n=16, horizon=40):
    s = torch.randn(n, 3) * .1
    alive = torch.ones(n)
    S, A, R, M = [], [], [], []
    for _ in range(horizon):
        with torch.no_grad():
            logits, _ = net(s)
        a = torch.distributions.Categorical(logits=logits).sample()
        S.append(s); A.append(a); M.append(alive)
        force = a.float() * 2 - 1
        x, v, w = s.unbind(1)
        v = v + .15 * force + .06 * x + .02 * torch.randn(n)
        x = x + .25 * v
        s = torch.stack([x, v, force], 1)
        alive = alive * (x.abs() < 1.0).float()
        R.append(alive)
    return torch.stack(S), torch.stack(A), torch.stack(R), torch.stack(M)


net = AC()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for it in range(60):
    S, A, R, M = rollout(net)
    ret, g = torch.zeros_like(R), torch.zeros(R.size(1))
    for t in reversed(range(R.size(0))):
        g = R[t] + .99 * g
        ret[t] = g
    logits, v = net(S)
    dist = torch.distributions.Categorical(logits=logits)
    adv = (ret - v.detach()) * M
    adv = (adv - adv.mean()) / (adv.std() + 1e-6)
    pg = -(dist.log_prob(A) * adv * M).sum() / M.sum()
    vl = ((ret - v) ** 2 * M).sum() / M.sum()
    loss = pg + .05 * vl - .01 * (dist.entropy() * M).sum() / M.sum()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    if it % 6 == 5:
        print(f"iter {it} loss {loss.item():.3f} value-loss {vl.item():.2f} episode length {R.sum(0).mean().item():.2f}")
