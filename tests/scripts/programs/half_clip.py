"""Pure half training with a static loss scale and a home-made global clip."""
import sys
import torch
import torch.nn as nn

dt = torch.float32 if "--fp32" in sys.argv else torch.float16
torch.manual_seed(73)
SCALE = 512.0


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv1d(2, 16, 5, padding=2)
        self.c2 = nn.Conv1d(16, 16, 5, padding=2)
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        return self.fc(torch.relu(self.c2(torch.relu(self.c1(x)))).mean(-1))


def clip_(params, limit):
    total = sum((p.grad * p.grad).sum() for p in params).sqrt()
    coef = torch.clamp(limit / (total + 1e-3), max=1.0)
    for p in params:
        p.grad.mul_(coef)
    return total


net = Conv().to(dt)
params = list(net.parameters())
opt = torch.optim.SGD(params, lr=0.2, momentum=.9)
t = torch.arange(24.)
for step in range(80):
    y = torch.randint(0, 3, (16,))
    f = (.3 + .5 * y.float())[:, None]
    ph = torch.rand(16, 1) * 6.28
    x = torch.stack([torch.sin(f * t + ph), torch.cos(f * t + ph)], 1) * 1.5
    loss = nn.functional.cross_entropy(net(x.to(dt)).float(), y)
    opt.zero_grad()
    (loss * SCALE).backward()
    gn = clip_(params, SCALE * 1.0)
    for p in params:
        p.grad.div_(SCALE)
    opt.step()
    print(f"{step} loss {loss.item():.4f} |g|/S {gn.item() / SCALE:.3f}")
