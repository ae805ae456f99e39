"""Time series: predict the phase of a weekly pattern from the hour index (sinusoidal features)."""
import torch
from torch import nn

torch.manual_seed(29)


class HourFeatures(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.register_buffer("freq", 2 * torch.pi / torch.tensor([2., 3, 4, 6, 8, 12, 24, 168, 5, 7, 9, 10, 14, 16, 18, 36]))

    def forward(self, hours):
        a = (hours[..., None].double() / (2 * torch.pi / self.freq.double()).round()) * 2 * torch.pi
        return torch.cat([a.sin(), a.cos()], -1).to(self.freq.dtype)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.feats = HourFeatures()
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 1))

    def forward(self, hours):
        return self.mlp(self.feats(hours))[..., 0]


model = Forecaster().to(dtype=torch.bfloat16)
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
g = torch.Generator().manual_seed(3)
run = 0.0
for step in range(150):
    hours = torch.randint(0, 8760, (64,), generator=g)
    load = torch.sin(2 * torch.pi * hours / 6) + 0.5 * torch.cos(2 * torch.pi * hours / 4)
    loss = nn.functional.mse_loss(model(hours).float(), load)
    opt.zero_grad()
    loss.backward()
    opt.step()
    run = 0.9 * run + 0.1 * loss.item()
    if step % 30 == 29:
        print(step, run)
