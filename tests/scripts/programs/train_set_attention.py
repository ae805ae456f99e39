import math
import torch
import torch.nn as nn

torch.manual_seed(80)
MAXN, D = 12, 32


def collate(n):
    """Sets of 0..MAXN items, the target is the mean of the items' first feature (0 for an empty set)."""
    size = torch.randint(0, MAXN + 1, (n,))
    valid = torch.arange(MAXN).unsqueeze(0) < size.unsqueeze(1)
    x = torch.randn(n, MAXN, 4) + torch.randn(n, 1, 4)
    x = x * valid.unsqueeze(-1)
    y = x[..., 0].sum(1) / size.clamp(min=1)
    return x, valid, y


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x, valid):
        q, k, v = self.q(x), self.k(x), self.v(x)
        att = q @ k.transpose(1, 2) / math.sqrt(D)
        bias = (1.0 - valid.to(att.dtype)) * -1e9
        att = att + bias.unsqueeze(1)
        return self.o(torch.softmax(att, -1) @ v)


class SetNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, D)
        self.att = Attention()
        self.head = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, 1))

    def forward(self, x, valid):
        h = self.inp(x)
        h = h + self.att(h, valid)
        keep = valid.unsqueeze(-1)
        pooled = h.masked_fill(~keep, 0.0).sum(1) / keep.sum(1).clamp(min=1)
        return self.head(pooled).squeeze(-1)


net = SetNet()
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for step in range(100):
    x, valid, y = collate(16)
    with torch.autocast("cpu", dtype=torch.float16):
        pred = net(x, valid)
    loss = nn.functional.smooth_l1_loss(pred.float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0 or step == 99:
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():g}")
