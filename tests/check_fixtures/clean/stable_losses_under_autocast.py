import torch
import torch.nn as nn
import torch.nn.functional as F


class Distiller(nn.Module):
    def __init__(self, student, teacher, temperature=2.0):
        super().__init__()
        self.student = student
        self.teacher = teacher.eval().requires_grad_(False)
        self.t = temperature

    def forward(self, x, y):
        s = self.student(x)
        with torch.no_grad():
            t = self.teacher(x)
        soft = F.kl_div(
            F.log_softmax(s / self.t, dim=-1), F.log_softmax(t / self.t, dim=-1), log_target=True, reduction="batchmean"
        )
        return F.cross_entropy(s, y) + self.t**2 * soft


def train(student, teacher, loader):
    distiller = Distiller(student, teacher).cuda()
    opt = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = distiller(x.cuda(), y.cuda())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
