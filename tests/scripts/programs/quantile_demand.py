import torch
from torch import nn

torch.manual_seed(6)
qs = torch.tensor([0.1, 0.5, 0.9])
net = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 3))
opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
W = torch.randn(6)


def load(n=32):
    x = torch.randn(n, 6)
    y = x @ W + (0.2 + 0.3 * x[:, 0].abs()) * torch.randn(n)
    x = torch.where(torch.rand(n, 6) < 0.05, torch.full_like(x, float("nan")), x)
    y = torch.where(torch.rand(n) < 0.1, torch.full_like(y, float("nan")), y)
    return x, y


hist = []
for step in range(200):
    x, y = load()
    present = ~torch.isnan(x)
    feats = torch.cat([torch.nan_to_num(x), present.float()], -1)
    keep = ~torch.isnan(y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = net(feats[keep])
    err = y[keep, None] - pred.float()
    loss = torch.maximum(qs * err, (qs - 1) * err).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    hist.append(loss.item())
    if step % 20 == 19:
        print(f"step {step + 1} pinball {sum(hist[-20:]) / 20:.4f}")
