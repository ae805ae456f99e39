import copy, torch
from torch import nn
torch.manual_seed(26)
mlp = lambda i, o: nn.Sequential(nn.Linear(i, 64), nn.ReLU(), nn.Linear(64, o))
actor, q1, q2 = mlp(6, 2), mlp(8, 1), mlp(8, 1)
t1, t2 = copy.deepcopy(q1), copy.deepcopy(q2)
oa = torch.optim.Adam(actor.parameters(), lr=1e-3); oq = torch.optim.Adam([*q1.parameters(), *q2.parameters()], lr=1e-3)
M = torch.randn(6, 2)
for s in range(220):
    o = torch.randn(48, 6)
    with torch.no_grad():
        a = torch.tanh(actor(o) + 0.3 * torch.randn(48, 2)); r = -((a - torch.tanh(o @ M)) ** 2).sum(1, keepdim=True)
        o2 = torch.randn(48, 6); y = r + 0.5 * torch.min(t1(torch.cat([o2, torch.tanh(actor(o2))], 1)), t2(torch.cat([o2, torch.tanh(actor(o2))], 1)))
    oa_in = torch.cat([o, a], 1)
    lq = (q1(oa_in) - y).pow(2).mean() + (q2(oa_in) - y).pow(2).mean()
    oq.zero_grad(); lq.backward(); oq.step()
    if s % 2 == 0:
        la = -q1(torch.cat([o, torch.tanh(actor(o))], 1)).mean()
        oa.zero_grad(); la.backward(); oa.step()
        with torch.no_grad():
            for t, q in ((t1, q1), (t2, q2)):
                for x, z in zip(t.parameters(), q.parameters()): x.lerp_(z, 0.02)
    if s % 50 == 0: print(s, lq.item(), r.mean().item())
