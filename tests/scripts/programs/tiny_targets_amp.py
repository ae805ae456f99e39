import argparse
import torch
import torch.nn as nn

UNIT = 1e-4


class Displacement(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.out = nn.Linear(48, 4)

    def forward(self, x):
        return self.out(self.trunk(x))


def get_batch(n):
    x = torch.randn(n, 6)
    y = torch.stack([torch.sin(x[:, 0]), x[:, 1] * x[:, 2], x[:, 3], torch.cos(x[:, 4])], 1)
    return x, y * UNIT


def main(cfg):
    torch.manual_seed(8)
    model = Displacement()
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr, eps=1e-12)
    for step in range(cfg.steps):
        x, y = get_batch(16)
        with torch.autocast("cpu", dtype=torch.float16, enabled=cfg.amp):
            pred = model(x)
        loss = ((pred.float() * UNIT - y) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            print(f"step {step} relative error {loss.item() / (y ** 2).mean().item():.4f} loss {loss.item():.3e}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--no-amp", dest="amp", action="store_false")
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--steps", type=int, default=200)
    main(ap.parse_args())
