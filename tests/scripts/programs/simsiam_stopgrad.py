"""SimSiam: two views, predictor, stop-gradient on the target side."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(25)
enc = nn.Sequential(nn.Linear(10, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 12))
pred = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 12))
opt = torch.optim.SGD(list(enc.parameters()) + list(pred.parameters()), lr=0.05, momentum=0.9)
pool = torch.randn(300, 10)


def augment(x):
    return x * (torch.rand_like(x) > 0.1) + 0.1 * torch.randn_like(x)


def D(p, z):
    return -F.cosine_similarity(p, z.detach(), dim=-1).mean()


for step in range(150):
    x = pool[torch.randint(0, 300, (32,))]
    z1, z2 = enc(augment(x)), enc(augment(x))
    p1, p2 = pred(z1), pred(z2)
    loss = D(p1, z2) / 2 + D(p2, z1) / 2
    opt.zero_grad()
    loss.backward()
    opt.step()
print("loss", loss.item())
