import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--dtype", default="bfloat16")
ap.add_argument("--steps", type=int, default=200)
ap.add_argument("--lr", type=float, default=1e-2)
args = ap.parse_args()
DT = getattr(torch, args.dtype)
torch.manual_seed(12)


class PositionFeatures(nn.Module):
    def __init__(self, n=8):
        super().__init__()
        self.register_buffer("periods", torch.tensor([2.0, 3.0, 4.0, 5.0, 7.0, 11.0, 16.0, 32.0][:n]))

    def forward(self, pos):
        ang = 2 * torch.pi * (pos[:, None] % self.periods) / self.periods
        return torch.cat([torch.sin(ang), torch.cos(ang)], -1)


class SlotModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = PositionFeatures()
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, idx):
        pos = idx.to(self.features.periods.dtype)
        return self.mlp(self.features(pos))


model = SlotModel().to(DT)
opt = torch.optim.SGD(model.parameters(), lr=args.lr * 10, momentum=0.9)
hist = []
for step in range(args.steps):
    idx = torch.randint(0, 4096, (64,))
    y = idx % 4
    loss = F.cross_entropy(model(idx).float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    hist.append(loss.item())
    if (step + 1) % 25 == 0:
        print(f"step {step + 1} loss {sum(hist[-25:]) / 25:.4f}")
