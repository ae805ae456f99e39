import torch
import torch.nn as nn
import torch.nn.functional as F

SEED, HORIZON = 12, 24
torch.manual_seed(SEED)

hours = torch.arange(4096)
daily = torch.randn(24)
weekly = torch.randn(7) * 0.5
series = daily[hours % 24] + weekly[(hours // 24) % 7] + 0.05 * torch.randn(4096)


class CalendarEncoding(nn.Module):
    def __init__(self, n_harmonics=12):
        super().__init__()
        k = torch.arange(1, n_harmonics + 1)
        self.register_buffer("freq", torch.cat([2 * torch.pi * k / 24, 2 * torch.pi * k[:4] / 168]))

    def forward(self, pos):
        angle = pos.unsqueeze(-1) * self.freq
        return torch.cat([angle.sin(), angle.cos()], -1)


class Forecaster(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.enc = CalendarEncoding()
        self.net = nn.Sequential(nn.Linear(32, d), nn.GELU(), nn.Linear(d, d), nn.GELU(), nn.Linear(d, 1))

    def forward(self, pos):
        return self.net(self.enc(pos)).squeeze(-1)


def windows(n, dtype):
    start = torch.randint(0, 4096 - HORIZON, (n,))
    idx = start[:, None] + torch.arange(HORIZON)
    return idx.to(dtype), series[idx]


def main():
    dtype = torch.bfloat16
    model = Forecaster()
    compiled = torch.compile(model, backend="eager")
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, total_iters=10)
    for step in range(120):
        pos, target = windows(32, dtype)
        with torch.autocast("cpu", dtype=dtype):
            out = compiled(pos)
            loss = F.mse_loss(out, target)
        loss.backward()
        opt.step()
        warm.step()
        opt.zero_grad()
        if (step + 1) % 20 == 0:
            print(f"{step + 1:4d}  mse {loss.item():.4f}  (variance {series.var().item():.3f})")


main()
