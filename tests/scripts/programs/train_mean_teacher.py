"""Semi-supervised two-view classifier with a weight-averaged teacher."""
import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(21)
D, C = 24, 6
centers = torch.randn(C, D) * 1.3


def batch(n):
    y = torch.randint(0, C, (n,))
    return centers[y] + torch.randn(n, D) * 0.9, y


def make_net():
    return nn.Sequential(nn.Linear(D, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, C))


class MeanTeacher:
    def __init__(self, student, decay=0.99):
        self.decay = decay
        self.net = copy.deepcopy(student).to(torch.bfloat16)
        for p in self.net.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, student):
        for pt, ps in zip(self.net.parameters(), student.parameters()):
            pt.mul_(self.decay).add_(ps.to(pt.dtype), alpha=1 - self.decay)

    @torch.no_grad()
    def __call__(self, x):
        return self.net(x.to(torch.bfloat16)).float()


student = make_net()
teacher = MeanTeacher(student, decay=0.996)
opt = torch.optim.SGD(student.parameters(), lr=0.02, momentum=0.9)
xv, yv = batch(400)
for step in range(200):
    x, y = batch(16)
    xu, _ = batch(32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = student(x)
        outu = student(xu + 0.1 * torch.randn_like(xu))
    sup = F.cross_entropy(out.float(), y)
    cons = F.mse_loss(outu.float().softmax(-1), teacher(xu).softmax(-1))
    w = min(1.0, step / 100)
    loss = sup + w * cons
    opt.zero_grad()
    loss.backward()
    opt.step()
    teacher.update(student)
    if step % 25 == 0 or step == 199:
        with torch.no_grad():
            tl = F.cross_entropy(teacher(xv), yv).item()
            ta = (teacher(xv).argmax(1) == yv).float().mean().item()
        print(f"step {step} sup {sup.item():.4f} cons {cons.item():.4f} teacher ce {tl:.4f} acc {ta:.3f}")
