"""Surrogate for the deflection field of a loaded beam (SI units, metres)."""
import argparse
import torch
import torch.nn as nn

cli = argparse.ArgumentParser()
cli.add_argument("--fp32", action="store_true")
amp = not cli.parse_args().fp32
torch.manual_seed(23)
L, UNIT = 32, 1e-3


class Beam(nn.Module):
    def __init__(self):
        super().__init__()
        self.load = nn.Sequential(nn.Linear(5, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU())
        self.field = nn.Linear(48, L)

    def forward(self, p):
        return self.field(self.load(p)).float() * UNIT    # network works in millimetres


xs = torch.linspace(0, 1, L)


def cases(n):
    p = torch.randn(n, 5)
    modes = torch.stack([torch.sin((k + 1) * torch.pi * xs) / (k + 1) ** 2 for k in range(5)])
    return p, 4e-4 * (torch.tanh(p) @ modes)


model = Beam()
opt = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-16)
for step in range(100):
    p, w = cases(32)
    with torch.autocast("cpu", torch.float16, enabled=amp):
        pred = model(p)
    loss = torch.mean((pred - w) ** 2)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0 or step == 99:
        print(f"{step} rmse {1e6 * loss.sqrt().item():.2f} um")
