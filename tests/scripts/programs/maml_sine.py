import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

torch.manual_seed(20)


class Sine(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x)


def task():
    amp, phase = torch.rand(1) * 2 + 0.5, torch.rand(1) * math.pi

    def draw(n):
        x = torch.rand(n, 1) * 6 - 3
        return x, amp * torch.sin(x + phase)
    return draw


def adapt(model, params, x, y, lr=0.05, inner=2):
    for _ in range(inner):
        loss = F.mse_loss(functional_call(model, params, (x,)), y)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        params = {k: p - lr * g for (k, p), g in zip(params.items(), grads)}
    return params


model = Sine()
meta = torch.optim.Adam(model.parameters(), lr=3e-3)
hist = []
for it in range(150):
    meta_loss = 0.0
    for _ in range(4):
        draw = task()
        fast = adapt(model, dict(model.named_parameters()), *draw(10))
        x, y = draw(10)
        meta_loss = meta_loss + F.mse_loss(functional_call(model, fast, (x,)), y)
    meta_loss = meta_loss / 4
    meta.zero_grad()
    meta_loss.backward()
    meta.step()
    hist.append(meta_loss.item())
    if (it + 1) % 25 == 0:
        print(f"iter {it + 1} query loss {sum(hist[-25:]) / 25:.4f}")
