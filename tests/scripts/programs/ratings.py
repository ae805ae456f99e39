"""Rating prediction; the loader yields one float table (user, item, rating)."""
import os
import torch
import torch.nn as nn

PREC = {"fp32": torch.float32, "bf16": torch.bfloat16}[os.environ.get("PRECISION", "bf16")]
torch.manual_seed(51)
USERS, ITEMS = 200, 700
ROWS = 704                                # tables padded to a multiple of 64
gt_u, gt_i = torch.randn(USERS) * .3, torch.randn(ITEMS)


def loader(steps, n=64):
    for _ in range(steps):
        u = torch.randint(0, USERS, (n,))
        i = torch.randint(0, ITEMS, (n,))
        r = gt_u[u] + gt_i[i] + .1 * torch.randn(n)
        yield torch.stack([u.float(), i.float(), r], 1)


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, 8)
        self.item = nn.Embedding(ROWS, 8)
        self.score = nn.Linear(16, 1)
        nn.init.zeros_(self.user.weight)
        nn.init.zeros_(self.item.weight)

    def forward(self, rows):
        u = self.user(rows[:, 0].long())
        i = self.item(rows[:, 1].long())
        with torch.autocast("cpu", torch.bfloat16, enabled=PREC is torch.bfloat16):
            return self.score(torch.cat([u, i], 1))[:, 0]


def to_device(batch, device="cpu", dtype=PREC):
    return batch.to(device=device, dtype=dtype)


net = Recommender()
opt = torch.optim.Adam(net.parameters(), lr=0.08)
ema = None
for step, table in enumerate(loader(120)):
    rows = to_device(table)
    err = net(rows).float() - rows[:, 2].float()
    loss = (err ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    ema = loss.item() if ema is None else .9 * ema + .1 * loss.item()
    if step % 20 == 19:
        print("step", step, "mse (smoothed)", round(ema, 4))
