import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F


class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Net(nn.Module):
    def __init__(self, d=12, h=40):
        super().__init__()
        self.norm_in = RMSNorm(d)
        self.fc1 = nn.Linear(d, h)
        self.norm = RMSNorm(h)
        self.fc2 = nn.Linear(h, 1)

    def forward(self, x):
        h = torch.relu(self.fc1(self.norm_in(x)))
        return self.fc2(self.norm(h)).squeeze(-1)


def batch(n):
    x = torch.randn(n, 12) * 500
    return x, (x[:, 0] - x[:, 1]) / (x.norm(dim=1) + 1)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--half", type=int, default=1)
    p.add_argument("--steps", type=int, default=150)
    a = p.parse_args()
    dt = torch.float16 if a.half else torch.float32
    torch.manual_seed(1)
    model = Net().to(dt)
    master = [q.detach().float().clone() for q in model.parameters()]
    opt = torch.optim.Adam(master, lr=5e-3)
    for step in range(a.steps):
        x, y = batch(32)
        loss = F.mse_loss(model(x.to(dt)).float(), y)
        model.zero_grad()
        loss.backward()
        for m, q in zip(master, model.parameters()):
            m.grad = q.grad.float()
        opt.step()
        with torch.no_grad():
            for m, q in zip(master, model.parameters()):
                q.copy_(m)
        if step % 15 == 0:
            print(f"step {step} mse {loss.item():.5f}")


main()
