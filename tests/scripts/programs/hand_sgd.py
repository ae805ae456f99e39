import torch
import torch.nn as nn
import torch.nn.functional as F


def count_parameters(module):
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


torch.manual_seed(14)
LR, MOMENTUM, STEPS = 0.05, 0.9, 200


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(8, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x))).squeeze(1)


def data(n):
    x = torch.rand(n, 8) * 2 - 1
    return x, x[:, 0] * 2 - x[:, 1] + torch.sin(3 * x[:, 2])


model = MLP()
print("parameters", count_parameters(model))
velocity = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
for step in range(STEPS):
    x, y = data(64)
    loss = F.mse_loss(model(x), y)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for (name, p), g in zip(model.named_parameters(), grads):
            velocity[name].mul_(MOMENTUM).add_(g)
            p.sub_(LR * velocity[name])
    if step % 25 == 0:
        print(f"step {step}: loss {loss.item():.5f}")

x, y = data(512)
with torch.no_grad():
    print("test mse", F.mse_loss(model(x), y).item())
