import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(5)
encoder = nn.Sequential(nn.Linear(8, 20), nn.Tanh())
head_a = nn.Linear(20, 1)
head_b = nn.Linear(20, 4)
# both tasks update the encoder through their own optimizer
opt_a = torch.optim.Adam([*encoder.parameters(), *head_a.parameters()], lr=2e-3)
opt_b = torch.optim.SGD([*encoder.parameters(), *head_b.parameters()], lr=5e-2)
W = torch.randn(8, 4)


def task_a():
    x = torch.randn(20, 8)
    y = x[:, :1] - x[:, 1:2]
    return F.mse_loss(head_a(encoder(x)), y)


def task_b():
    x = torch.randn(20, 8)
    return F.cross_entropy(head_b(encoder(x)), (x @ W).argmax(1))


la = lb = None
for i in range(200):
    if i % 2 == 0:
        opt_a.zero_grad()
        la = task_a()
        la.backward()
        opt_a.step()
    else:
        opt_b.zero_grad()
        lb = task_b()
        lb.backward()
        opt_b.step()
print(la.item(), lb.item())
