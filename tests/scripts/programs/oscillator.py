"""DDSP-like synthesiser: estimate amplitudes of harmonics given f0; phase by cumulative sum."""
import torch
from torch import nn

torch.manual_seed(71)
SR, N = 4000, 2048


class Synth(nn.Module):
    def __init__(self, nh=8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, nh))
        self.register_buffer("k", torch.arange(1, nh + 1).float())

    def forward(self, feat, f0):
        amp = self.net(feat)
        phase = torch.cumsum(f0 / SR, -1)
        waves = torch.sin(2 * torch.pi * self.k[:, None] * phase[:, None, :])
        return (amp[..., None] * waves).sum(1)


def truth(feat, f0, mix):
    phase = torch.cumsum(f0 / SR, -1)
    k = torch.arange(1, 9.0)
    return ((feat @ mix)[..., None] * torch.sin(2 * torch.pi * k[:, None] * phase[:, None, :])).sum(1)


mix = torch.randn(8, 8)
dtype = torch.bfloat16
model = Synth().to(dtype)
master = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(80):
    feat = torch.randn(8, 8)
    f0 = 110 + 40 * torch.rand(8, 1).expand(8, N)
    audio = truth(feat, f0, mix)
    est = model(feat.to(dtype), f0.to(dtype))
    loss = (est.float() - audio).pow(2).mean()
    master.zero_grad()
    loss.backward()
    master.step()
    if step % 16 == 0 or step == 79:
        print(step, loss.item())
