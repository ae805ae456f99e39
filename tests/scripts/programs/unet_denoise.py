import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=100)
ap.add_argument("--channels", type=int, default=12)
ap.add_argument("--lr", type=float, default=2e-3)
args = ap.parse_args()
torch.manual_seed(0)


class TimeEmbed(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t):
        return self.fc(t[:, None])[:, :, None, None]


class UNet(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.time = TimeEmbed(ch)
        self.down1 = nn.Conv2d(1, ch, 3, padding=1)
        self.down2 = nn.Conv2d(ch, 2 * ch, 3, stride=2, padding=1)
        self.mid = nn.Conv2d(2 * ch, 2 * ch, 3, padding=1)
        self.attn_gate = nn.Conv2d(ch, ch, 1)
        self.up = nn.ConvTranspose2d(2 * ch, ch, 2, stride=2)
        self.out = nn.Conv2d(2 * ch, 1, 3, padding=1)

    def forward(self, x, t):
        a = F.silu(self.down1(x) + self.time(t))
        b = F.silu(self.down2(a))
        b = b + F.silu(self.mid(b))
        skip = a
        u = F.silu(self.up(b))
        return self.out(torch.cat([u, skip], 1))


def blobs(n):
    yy, xx = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    c = torch.rand(n, 2, 1, 1) * 8 + 2
    return torch.exp(-((yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2) / 6).unsqueeze(1) * 2 - 1


net = UNet(args.channels)
opt = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=0.0)
for it in range(args.steps):
    x0 = blobs(16)
    t = torch.rand(16)
    eps = torch.randn_like(x0)
    ab = torch.cos(t * 1.5)[:, None, None, None] ** 2
    xt = ab.sqrt() * x0 + (1 - ab).sqrt() * eps
    loss = F.mse_loss(net(xt, t), eps)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 20 == 0:
        print(f"iter {it} mse {loss.item():.4f}")
