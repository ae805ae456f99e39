import torch
import torch.nn as nn
import torch.nn.functional as F


def count_parameters(module):
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


torch.manual_seed(11)


class Spiral(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))

    def forward(self, x):
        return self.net(x)


def spiral(n=64):
    y = torch.randint(0, 3, (n,))
    r = torch.rand(n) * 2 + 0.1
    t = r * 2 + y * 2.094 + 0.1 * torch.randn(n)
    return torch.stack([r * t.cos(), r * t.sin()], 1), y


model = Spiral()
print("parameters", count_parameters(model))
opt = torch.optim.SGD(model.parameters(), lr=0.8, momentum=0.9)
sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=75, eta_min=1e-4)
hist = []
for step in range(300):
    x, y = spiral()
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    opt.step()
    sched.step()
    hist.append(loss.item())
    if (step + 1) % 15 == 0:
        print(f"step {step + 1} lr {opt.param_groups[0]['lr']:.4f} loss {sum(hist[-15:]) / 15:.4f}")
