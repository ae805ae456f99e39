import math
import torch
from torch import nn

torch.manual_seed(5)
N = 2048
dtype = torch.bfloat16
grid = torch.linspace(0, 1, N)
wave = 0.6 * torch.sin(2 * math.pi * 120 * grid) + 0.4 * torch.sin(2 * math.pi * 67 * grid + 0.7)


class Encoding(nn.Module):
    def __init__(self, bands=9):
        super().__init__()
        self.register_buffer("freq", 2.0 ** torch.arange(bands) * math.pi)

    def forward(self, t):
        a = t[:, None].float() * self.freq
        return torch.cat([a.sin(), a.cos()], -1)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = Encoding()
        self.net = nn.Sequential(nn.Linear(18, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, t):
        return self.net(self.enc(t)).squeeze(-1)


coords = grid.to(dtype)
field = Field()
opt = torch.optim.Adam(field.parameters(), lr=5e-3)
for step in range(200):
    idx = torch.randint(0, N, (256,))
    with torch.autocast("cpu", dtype=dtype):
        out = field(coords[idx])
    loss = nn.functional.mse_loss(out.float(), wave[idx])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 25 == 0 or step == 199:
        print(f"step {step} mse {loss.item():.4f}")
