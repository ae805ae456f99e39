"""Two mistakes in an FP16 loop: gradients are clipped while scaled, and a norm written by hand overflows when inputs are loud.

nanny check examples/two_mistakes.py --diff    # the first, before anything runs
nanny run examples/two_mistakes.py             # the second, when it happens
"""

import torch
from torch import nn


class Unit(nn.Module):
    """Vectors of length one."""

    def forward(self, x):
        return x / (x * x).sum(-1, keepdim=True).sqrt()


def make_model():
    model = nn.Sequential()
    model.add_module("embed", nn.Linear(16, 128))
    model.add_module("unit", Unit())
    model.add_module("head", nn.Linear(128, 1))
    return model


def train(model, steps=60):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(steps):
        x = torch.randn(64, 16) * (1 + 2 * step)  # the inputs get louder
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = nn.functional.mse_loss(out.float(), x[:, :1].sign())
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 20 == 19:
            print(f"step {step:2d}  loss {loss.item():.4f}  loss scale {scaler.get_scale():g}")


if __name__ == "__main__":
    torch.manual_seed(0)
    train(make_model())
