import torch
import torch.nn as nn


def count_parameters(module):
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


DTYPE = torch.float16
SIDE, BATCH, STEPS = 24, 16, 100


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 6, 4, 4), nn.GELU())
        self.up = nn.ConvTranspose2d(6, 1, 4, 4)

    def forward(self, x):
        return self.up(self.down(x))


def images(n, g):
    cx = torch.rand(n, 2, 1, 1, generator=g) * SIDE
    yy, xx = torch.meshgrid(torch.arange(float(SIDE)), torch.arange(float(SIDE)), indexing="ij")
    return 10 * torch.exp(-((xx - cx[:, :1]) ** 2 + (yy - cx[:, 1:]) ** 2) / 60) + 2.5


def main():
    torch.manual_seed(23)
    g = torch.Generator().manual_seed(0)
    model = AutoEncoder().to(DTYPE)
    print("parameters", count_parameters(model))
    opt = torch.optim.SGD(model.parameters(), lr=5e-7, momentum=0.9)
    for step in range(STEPS):
        x = images(BATCH, g).to(DTYPE)
        loss = (model(x) - x).pow(2).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            print(f"step {step} sse {loss.item():.1f}")


main()
