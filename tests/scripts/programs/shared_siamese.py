import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=150)
p.add_argument("--margin", type=float, default=1.0)
a = p.parse_args()
torch.manual_seed(4)


class SharedBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.lin = nn.Linear(d, d)
        self.norm = nn.LayerNorm(d)

    def forward(self, x):
        return x + F.gelu(self.lin(self.norm(x)))


class Siamese(nn.Module):
    def __init__(self, d=30, h=32, depth=3):
        super().__init__()
        self.stem = nn.Linear(d, h)
        block = SharedBlock(h)
        self.blocks = nn.ModuleList([block] * depth)
        self.out = nn.Linear(h, 8, bias=False)

    def embed(self, x):
        h = self.stem(x)
        for b in self.blocks:
            h = b(h)
        return self.out(h)

    def forward(self, x1, x2):
        return (self.embed(x1) - self.embed(x2)).norm(dim=1)


proto = torch.randn(15, 30)
model = Siamese()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(a.steps):
    c1 = torch.randint(0, 15, (64,))
    same = torch.rand(64) < 0.5
    c2 = torch.where(same, c1, torch.randint(0, 15, (64,)))
    y = (c1 == c2).float()
    dist = model(proto[c1] + 0.4 * torch.randn(64, 30), proto[c2] + 0.4 * torch.randn(64, 30))
    loss = (y * dist ** 2 + (1 - y) * F.relu(a.margin - dist) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 25 == 0:
        print(f"step {step} contrastive {loss.item():.4f}")
