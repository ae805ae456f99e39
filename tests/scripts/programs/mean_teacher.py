"""Semi-supervised mean teacher; the averaged copy is what gets shipped."""
import copy
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

LOW = os.environ.get("PRECISION", "bf16") != "fp32"
torch.manual_seed(14)
DECAY = 0.97


def build():
    return nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 5))


centers = torch.randn(5, 16)


def draw(n):
    y = torch.randint(0, 5, (n,))
    return centers[y] + 1.1 * torch.randn(n, 16), y


class AveragedCopy:
    def __init__(self, student):
        self.net = copy.deepcopy(student).requires_grad_(False)

    @torch.no_grad()
    def update(self, student):
        for pt, ps in zip(self.net.parameters(), student.parameters()):
            pt.lerp_(ps.detach().to(pt.dtype), 1.0 - DECAY)

    @torch.no_grad()
    def __call__(self, x):
        return self.net(x.to(next(self.net.parameters()).dtype)).float()


student = build()
teacher = AveragedCopy(student)
opt = torch.optim.Adam(student.parameters(), lr=1e-3)
xv, yv = draw(400)
for step in range(120):
    x, y = draw(16)
    xu, _ = draw(16)
    with torch.autocast("cpu", torch.bfloat16, enabled=LOW):
        sup = F.cross_entropy(student(x), y)
        cons = F.mse_loss(student(xu + .1 * torch.randn_like(xu)).softmax(-1).float(), teacher(xu).softmax(-1))
        loss = sup + min(1.0, step / 60) * 2.0 * cons
    opt.zero_grad()
    loss.backward()
    opt.step()
    teacher.update(student)
    if (step + 1) % 20 == 0:
        tl = F.cross_entropy(teacher(xv), yv).item()
        with torch.no_grad():
            sl = F.cross_entropy(student(xv), yv).item()
        print(f"{step+1} sup {sup.item():.3f} cons {cons.item():.4f} | val student {sl:.3f} teacher {tl:.3f}")
