"""Generative moment matching: sampler for sensor readings, RBF-kernel MMD loss."""
import argparse
import torch
import torch.nn as nn

ap = argparse.ArgumentParser()
ap.add_argument("--fp32", action="store_true")
a = ap.parse_args()
torch.manual_seed(31)
CENTER = torch.tensor([41.0, -36.5, 22.0])


def real(n):
    k = torch.randint(0, 3, (n, 1)).float() - 1
    return CENTER + torch.cat([1.6 * k, -1.2 * k, 0.8 * k.abs()], 1) + .25 * torch.randn(n, 3)


class Sampler(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, z):
        return self.body(z) + CENTER


def sqdist(x, y):
    xx = (x * x).sum(1)[:, None]
    yy = (y * y).sum(1)[None, :]
    return xx + yy - 2 * (x @ y.t())


def kernel(x, y):
    d = sqdist(x, y)
    return sum(torch.exp(-d / (2 * s)) for s in (0.5, 2.0, 8.0)).mean()


def mmd(x, y):
    return kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)


gen = Sampler()
opt = torch.optim.Adam(gen.parameters(), lr=5e-3)
for step in range(100):
    with torch.autocast("cpu", torch.bfloat16, enabled=not a.fp32):
        fake = gen(torch.randn(32, 4))
        loss = mmd(fake, real(32))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(f"step {step} mmd {loss.item():.4f}")
with torch.no_grad():
    f, r = gen(torch.randn(400, 4)).double(), real(400).double()
    c = CENTER.double()
    print("final exact mmd %.5f  std fake %s real %s" % (mmd(f - c, r - c).item(), f.std(0).tolist(), r.std(0).tolist()))
