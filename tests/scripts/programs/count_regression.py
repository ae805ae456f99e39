"""Poisson regression of page views; the net predicts log-rate."""
import argparse, torch
from torch import nn

class RateNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.log_rate = nn.Linear(32, 1)
        nn.init.constant_(self.log_rate.bias, 8.0)
    def forward(self, x):
        return self.log_rate(self.trunk(x))[:, 0]

def poisson_nll(log_rate, views, unit):
    rate = torch.exp(log_rate)
    return ((rate.float() - views * log_rate) / unit).mean()

def run(low, steps=100):
    torch.manual_seed(3)
    w = torch.randn(10) * .45
    net = RateNet()
    opt = torch.optim.Adam(net.parameters(), lr=6e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=low)
    skipped = 0
    for i in range(steps):
        x = torch.randn(24, 10)
        views = torch.poisson(torch.exp(10.6 + (x @ w).clamp(-1.5, 1.5)))
        with torch.autocast("cpu", torch.float16, enabled=low):
            lr_ = net(x)
            loss = poisson_nll(lr_, views, 4e4)
        opt.zero_grad()
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        skipped += scaler.get_scale() < before
        print(f"{i:3d} nll {loss.item():.4f} max log-rate {lr_.max().item():.2f} skipped {skipped}")

if __name__ == "__main__":
    p = argparse.ArgumentParser(); p.add_argument("--fp32", action="store_true")
    run(not p.parse_args().fp32)
