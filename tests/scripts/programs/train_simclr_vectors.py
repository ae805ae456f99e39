"""Two-view contrastive pretraining on synthetic feature vectors."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(90)
DIM = 32
basis = torch.randn(8, DIM)


def two_views(n):
    z = torch.randn(n, 8)
    base = z @ basis
    return base + 0.5 * torch.randn(n, DIM), base + 0.5 * torch.randn(n, DIM)


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU())
        self.proj = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        return F.normalize(self.proj(self.backbone(x)), dim=-1)


class NTXent(nn.Module):
    def __init__(self, temperature=0.07):
        super().__init__()
        self.t = temperature

    def forward(self, a, b):
        z = torch.cat([a, b])
        sim = z @ z.t()
        n = len(a)
        mask = ~torch.eye(2 * n, dtype=torch.bool)
        weights = torch.exp(sim / self.t)
        denom = (weights * mask).sum(1)
        pos = torch.exp((a * b).sum(-1) / self.t)
        pos = torch.cat([pos, pos])
        return -torch.log(pos / denom).mean()


model, criterion = Projector(), NTXent()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
for step in range(100):
    a, b = two_views(32)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = criterion(model(a), model(b))
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0 or step == 99:
        print(f"step {step} ntxent {loss.item():.4f}")
