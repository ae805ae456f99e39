import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(30)
rng = np.random.default_rng(30)

N = 1200
built = rng.integers(1990, 2021, N)
easting = 431200 + rng.random(N) * 900
area = 40 + rng.random(N) * 120
rooms = rng.integers(1, 6, N)
price = 0.08 * (built - 2005) + np.sin((easting - 431200) / 900 * 6) * 1.5 + 0.01 * (area - 100) + 0.1 * rooms
price = price + rng.normal(size=N) * 0.1
table = np.stack([built, easting, area, rooms], 1)


class Frame:
    """Keeps the table compact in memory and hands out standardised batches."""

    def __init__(self, arr, target):
        self.x = torch.tensor(arr).to(torch.bfloat16)
        self.y = torch.tensor(target, dtype=torch.float32)
        xf = self.x.float()
        self.mean, self.std = xf.mean(0), xf.std(0) + 1e-6

    def batches(self, size):
        for idx in torch.randperm(len(self.x)).split(size):
            yield (self.x[idx].float() - self.mean) / self.std, self.y[idx]


frame = Frame(table, price)
net = nn.Sequential(nn.Linear(4, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1))
opt = torch.optim.AdamW(net.parameters(), lr=6e-3, weight_decay=1e-3)
for epoch in range(10):
    tot, n = 0.0, 0
    for x, y in frame.batches(64):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = net(x).squeeze(-1)
        loss = nn.functional.mse_loss(out.float(), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        tot, n = tot + loss.item(), n + 1
    print(f"epoch {epoch} mse {tot / n:.4f} (var {frame.y.var().item():.3f})")
