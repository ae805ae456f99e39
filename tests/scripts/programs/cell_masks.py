"""Binary segmentation of round cells, bf16 autocast."""
import argparse
import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--fp32", action="store_true")
LOWP = not parser.parse_args().fp32
torch.manual_seed(28)


def images(n=8, s=16):
    yy, xx = torch.meshgrid(torch.arange(s).float(), torch.arange(s).float(), indexing="ij")
    c = torch.rand(n, 2) * 8 + 4
    r = torch.rand(n) * 2 + 2.5
    mask = (((yy - c[:, 0, None, None]) ** 2 + (xx - c[:, 1, None, None]) ** 2) < r[:, None, None] ** 2).float()
    return (mask + .45 * torch.randn(n, s, s))[:, None], mask[:, None]


class Seg(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU())
        self.head = nn.Conv2d(12, 1, 1)

    def forward(self, x):
        return torch.sigmoid(self.head(self.enc(x)))


def pixel_loss(p, t):
    return -(t * p.log() + (1 - t) * (1 - p).log()).mean()


net = Seg()
opt = torch.optim.Adam(net.parameters(), lr=2.5e-3)
for step in range(90):
    x, t = images()
    with torch.autocast("cpu", torch.bfloat16, enabled=LOWP):
        p = net(x)
        loss = pixel_loss(p, t)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    print(f"step {step}: bce {loss.item():.4f} pmax {p.max().item():.6f}")
