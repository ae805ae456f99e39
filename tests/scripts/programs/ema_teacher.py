import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(3)
student = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3))
teacher = copy.deepcopy(student)
for p in teacher.parameters():
    p.requires_grad = False
opt = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
W = torch.randn(8, 3)


@torch.no_grad()
def update_teacher(m=0.98):
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.mul_(m).add_(s, alpha=1 - m)
    for t, s in zip(teacher.buffers(), student.buffers()):
        t.copy_(s)


teacher.eval()
for it in range(160):
    xl = torch.randn(16, 8)
    yl = (xl @ W).argmax(1)
    xu = torch.randn(32, 8)
    sup = F.cross_entropy(student(xl), yl)
    with torch.no_grad():
        target = teacher(xu + 0.05 * torch.randn_like(xu)).softmax(-1)
    cons = F.mse_loss(student(xu).softmax(-1), target)
    loss = sup + min(1.0, it / 80) * cons
    opt.zero_grad()
    loss.backward()
    opt.step()
    update_teacher()
print("sup", sup.item(), "cons", cons.item())
