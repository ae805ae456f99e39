"""Regress soil moisture from sensor columns; features are log-transformed."""
import sys
import torch
from torch import nn
from torch.utils.data import Dataset, DataLoader

low = "--fp32" not in sys.argv


class Readings(Dataset):
    def __init__(self, n=960):
        g = torch.Generator().manual_seed(40)
        raw = torch.rand(n, 8, generator=g) * 20
        self.y = (raw[:, :3].log1p().sum(1) - raw[:, 4] * .1 + .05 * torch.randn(n, generator=g)) / 3 - 2
        raw[613, 5] = -1.0                 # "no reading" code of the logger
        self.x = torch.log1p(raw) - 2.0

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def main():
    torch.manual_seed(0)
    model = Regressor()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = 0
    for epoch in range(2):
        for x, y in DataLoader(Readings(), batch_size=16, shuffle=False):
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                loss = nn.functional.smooth_l1_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(f"e{epoch} s{step} loss {loss.item():.4f}")
            step += 1


main()
