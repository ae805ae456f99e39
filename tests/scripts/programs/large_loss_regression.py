import argparse
import torch
from torch import nn


def count_parameters(module):
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=250)
ap.add_argument("--lr", type=float, default=0.03)
args = ap.parse_args()
torch.manual_seed(8)


class Revenue(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def sample(n=64):
    x = torch.rand(n, 6)
    return x, 300 + 200 * x[:, 0] * x[:, 1] - 150 * x[:, 2] + 100 * x[:, 3] ** 2


model = Revenue()
print("parameters", count_parameters(model))
opt = torch.optim.Adam(model.parameters(), lr=args.lr)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps)
for step in range(args.steps):
    x, y = sample()
    loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    if step % 25 == 0 or step == args.steps - 1:
        print(f"step {step} mse {loss.item():.1f}")
