import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(12)
STEPS, BATCH, REFRESH = 220, 48, 175


class Encoder(nn.Module):
    def __init__(self, d=20, h=48, out=16):
        super().__init__()
        self.l1 = nn.Linear(d, h)
        self.l2 = nn.Linear(h, h)
        self.out = nn.Linear(h, out)

    def forward(self, x):
        x = F.gelu(self.l1(x))
        return self.out(F.gelu(self.l2(x)))


class Projector(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.fc = nn.Linear(d, d)

    def forward(self, z):
        return F.normalize(self.fc(z), dim=-1)


centers = torch.randn(12, 20) * 1.5
encoder, projector = Encoder(), Projector()
opt = torch.optim.Adam([{"params": encoder.parameters()}, {"params": projector.parameters(), "lr": 2e-3}], lr=1e-3)


def views():
    c = torch.randint(0, 12, (BATCH,))
    base = centers[c] + torch.randn(BATCH, 20) * 0.6
    return base + 0.2 * torch.randn_like(base), base + 0.2 * torch.randn_like(base)


def encode(x, step):
    snapshot = step > 0 and step % REFRESH == 0
    with torch.set_grad_enabled(not snapshot):
        z = encoder(x)
    if snapshot:
        print(f"snapshot of features at step {step}: mean norm {z.norm(dim=1).mean().item():.3f}")
    return z


for step in range(STEPS):
    a, b = views()
    za, zb = projector(encode(a, step)), projector(encode(b, step))
    sim = za @ zb.t() / 0.2
    target = torch.arange(BATCH)
    loss = 0.5 * (F.cross_entropy(sim, target) + F.cross_entropy(sim.t(), target))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 0:
        print(f"step {step} nce {loss.item():.4f}")
