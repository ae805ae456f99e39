import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(19)


def mlp(h):
    return nn.Sequential(nn.Linear(10, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 5))


W = torch.randn(10, 5)


def batch(n=64):
    x = torch.randn(n, 10)
    return x, (x @ W + torch.sin(3 * x[:, :5])).argmax(1)


class Distiller(nn.Module):
    def __init__(self, teacher, student, T=3.0, alpha=0.7):
        super().__init__()
        self.teacher, self.student, self.T, self.alpha = teacher.eval(), student, T, alpha

    def forward(self, x, y):
        with torch.no_grad():
            t = self.teacher(x)
        s = self.student(x)
        kd = F.kl_div(F.log_softmax(s / self.T, -1), F.softmax(t / self.T, -1), reduction="batchmean") * self.T ** 2
        return self.alpha * kd + (1 - self.alpha) * F.cross_entropy(s, y)


teacher = mlp(96)
opt = torch.optim.Adam(teacher.parameters(), lr=3e-3)
for i in range(150):
    x, y = batch()
    loss = F.cross_entropy(teacher(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"teacher loss {loss.item():.4f}")

d = Distiller(teacher, mlp(24))
opt = torch.optim.Adam(d.student.parameters(), lr=3e-3)
for i in range(150):
    x, y = batch()
    loss = d(x, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i % 25 == 0:
        print(f"student step {i} loss {loss.item():.4f}")
x, y = batch(1000)
print("teacher acc", (teacher(x).argmax(1) == y).float().mean().item(), "student acc", (d.student(x).argmax(1) == y).float().mean().item())
