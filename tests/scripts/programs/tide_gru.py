"""GRU forecaster of tide gauges; one shard holds mislabeled gauges, training recovers."""
import argparse
import torch
from torch import nn


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(1, 32, batch_first=True)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


def gauge(n, T=17):
    t = torch.arange(T).float()
    f = torch.rand(n, 1) * .4 + .3
    return torch.sin(f * t + torch.rand(n, 1) * 6.28)[..., None]


def train(amp):
    torch.manual_seed(35)
    net = Forecaster()
    opt = torch.optim.Adam(net.parameters(), lr=8e-3)
    for step in range(100):
        s = gauge(16)
        x, y = s[:, :-1], s[:, 1:].clone()
        if 50 <= step < 52:
            y[::2] = y[::2] * -6.0 + 4.0
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            p = net(x)
        loss = nn.functional.mse_loss(p.float(), y)
        opt.zero_grad()
        loss.backward()
        gn = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()
        if step % 10 == 9 or 48 <= step <= 56:
            print(f"step {step} loss {loss.item():.4f} gnorm {gn.item():.3f}")


if __name__ == "__main__":
    a = argparse.ArgumentParser(); a.add_argument("--fp32", action="store_true")
    train(not a.parse_args().fp32)
