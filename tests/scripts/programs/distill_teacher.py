import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def net(h):
    return nn.Sequential(nn.Linear(9, h), nn.ReLU(), nn.Dropout(0.1), nn.Linear(h, 3))


class Distiller:
    def __init__(self, teacher, student, T=2.0, alpha=0.7):
        self.teacher, self.student, self.T, self.alpha = teacher, student, T, alpha
        self.opt = torch.optim.Adam(student.parameters(), lr=3e-3)
        self.teacher.eval()

    def step(self, x, y):
        self.student.train()
        with torch.inference_mode():
            soft = (self.teacher(x) / self.T).softmax(-1)
        out = self.student(x)
        kd = F.kl_div((out / self.T).log_softmax(-1), soft.clone(), reduction="batchmean") * self.T ** 2
        loss = self.alpha * kd + (1 - self.alpha) * F.cross_entropy(out, y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.item()


torch.manual_seed(39)
x = torch.randn(480, 9)
y = (x @ torch.randn(9, 3)).argmax(1)
dl = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)
teacher = net(40)
topt = torch.optim.Adam(teacher.parameters(), lr=5e-3)
for _ in range(4):
    for xb, yb in dl:
        topt.zero_grad()
        F.cross_entropy(teacher(xb), yb).backward()
        topt.step()
d = Distiller(teacher, net(12))
for _ in range(5):
    for xb, yb in dl:
        last = d.step(xb, yb)
print("kd loss", last)
