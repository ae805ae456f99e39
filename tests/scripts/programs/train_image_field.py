import torch
import torch.nn as nn

torch.manual_seed(5)
SIZE = 2048


def picture():
    ax = torch.arange(SIZE) / SIZE
    y, x = torch.meshgrid(ax, ax, indexing="ij")
    base = 0.5 + 0.25 * torch.sin(2 * torch.pi * 128 * x) + 0.05 * torch.cos(2 * torch.pi * 3 * y)
    return base + 0.25 * torch.sin(2 * torch.pi * 128 * y)


class FourierField(nn.Module):
    def __init__(self, bands=8, width=64):
        super().__init__()
        self.register_buffer("freq", 2.0 ** torch.arange(bands))
        self.mlp = nn.Sequential(nn.Linear(4 * bands, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def encode(self, xy):
        ang = (xy.unsqueeze(-1) * self.freq * 2 * torch.pi).flatten(1)
        return torch.cat([ang.sin(), ang.cos()], 1)

    def forward(self, xy):
        return self.mlp(self.encode(xy))


class PixelSampler:
    def __init__(self, img, dtype):
        self.img, self.dtype = img, dtype

    def draw(self, n):
        iy, ix = torch.randint(0, SIZE, (2, n))
        coords = torch.stack([ix, iy], 1) / SIZE
        return coords.to(self.dtype), self.img[iy, ix].unsqueeze(1)


img = picture()
sampler = PixelSampler(img, torch.bfloat16)
model = FourierField()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
avg = 0.0
for step in range(200):
    xy, rgb = sampler.draw(256)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(xy)
    loss = nn.functional.mse_loss(pred.float(), rgb)
    opt.zero_grad()
    loss.backward()
    opt.step()
    avg = loss.item() if step == 0 else 0.9 * avg + 0.1 * loss.item()
    if step % 20 == 0 or step == 199:
        print(f"step {step} mse {avg:.5f} psnr {-10 * torch.log10(torch.tensor(avg)).item():.2f}")
