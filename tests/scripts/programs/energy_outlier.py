"""Hourly load forecasting; a meter glitch puts one absurd value into the series."""
import argparse
import torch
import torch.nn as nn

ap = argparse.ArgumentParser(); ap.add_argument("--fp32", action="store_true")
amp = not ap.parse_args().fp32
torch.manual_seed(29)


def series(n=1600):
    t = torch.arange(n).float()
    s = torch.sin(t * .26) + .5 * torch.sin(t * .037) + .1 * torch.randn(n)
    s[731] = 1.0e6
    return s


load = series()


class Net(nn.Module):
    def __init__(self, ctx=12):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(ctx, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.f(x).squeeze(-1)


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=.9)
for step in range(90):
    i0 = step * 16
    x = torch.stack([load[i0 + j:i0 + j + 12] for j in range(16)])
    y = load[i0 + 12:i0 + 28]
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        loss = nn.functional.mse_loss(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step} loss {loss.item():.5g}")
