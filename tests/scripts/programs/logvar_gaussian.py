import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F


class Heteroscedastic(nn.Module):
    def __init__(self, h=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh())
        self.mean, self.logvar = nn.Linear(h, 1), nn.Linear(h, 1)

    def forward(self, x):
        h = self.body(x)
        return self.mean(h), self.logvar(h).clamp(-9, 5)


def nll(mu, lv, y):
    return 0.5 * (lv + (y - mu) ** 2 * torch.exp(-lv)).mean()


def sample(n=64):
    x = torch.rand(n, 1) * 4 - 2
    return x, torch.sin(2 * x) + (0.02 + 0.1 * (x > 0)) * torch.randn(n, 1)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=300)
    args = ap.parse_args()
    torch.manual_seed(19)
    model = Heteroscedastic()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(args.steps):
        x, y = sample()
        mu, lv = model(x)
        loss = nll(mu, lv, y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 30 == 0 or step == args.steps - 1:
            print(f"step {step} nll {loss.item():.4f} mse {F.mse_loss(mu, y).item():.4f}")
