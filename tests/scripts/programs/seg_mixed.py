import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=80)
    p.add_argument("--bs", type=int, default=4)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--amp", choices=["none", "bf16"], default="bf16")
    return p.parse_args()


def batch(bs, g):
    img = torch.randn(bs, 3, 16, 16, generator=g) * 0.3
    mask = torch.zeros(bs, 16, 16, dtype=torch.long)
    for i in range(bs):
        r, c = torch.randint(1, 8, (2,), generator=g).tolist()
        k = int(torch.randint(1, 3, (1,), generator=g))
        img[i, k, r:r + 7, c:c + 7] += 1.5
        mask[i, r:r + 7, c:c + 7] = k
    return img, mask


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(3, 12, 3, padding=1)
        self.c2 = nn.Conv2d(12, 24, 3, stride=2, padding=1)

    def forward(self, x):
        a = F.relu(self.c1(x))
        return a, F.relu(self.c2(a))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(24, 12, 2, stride=2)
        self.mix = nn.Conv2d(24, 16, 3, padding=1)
        self.cls = nn.Conv2d(16, 3, 1)

    def forward(self, skip, z):
        u = self.up(z)
        return self.cls(F.relu(self.mix(torch.cat([u, skip], 1))))


class SegModel(nn.Module):
    def __init__(self, use_amp):
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()
        self.use_amp = use_amp

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.use_amp):
            skip, z = self.encoder(x)
        skip, z = skip.float(), z.float()
        return self.decoder(skip, z)


def main():
    args = parse()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    net = SegModel(args.amp == "bf16")
    opt = torch.optim.Adam(net.parameters(), lr=args.lr)
    for it in range(args.steps):
        x, y = batch(args.bs, g)
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 10 == 0:
            print(f"[{it:04d}] loss={loss.item():.4f}")


if __name__ == "__main__":
    main()
