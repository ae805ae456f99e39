import torch
import torch.nn as nn
import torch.nn.functional as F

USE_BF16 = True


class FastNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.g, self.b = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        var = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) / torch.sqrt(var.clamp(min=0) + 1e-4) * self.g + self.b


class Spectrum(nn.Module):
    def __init__(self, d=32, h=32):
        super().__init__()
        self.norm = FastNorm(d)
        self.fc1 = nn.Linear(d, h)
        self.fc2 = nn.Linear(h, 3)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(self.norm(x))))


def spectra(n):
    y = torch.randint(0, 3, (n,))
    f = torch.arange(32.0)
    base = torch.randn(n, 1) * 2 + 30
    shape = torch.sin(f[None] * (0.3 + 0.3 * y[:, None])) * 0.8
    return base + shape + 0.2 * torch.randn(n, 32), y


def train(steps=120):
    torch.manual_seed(2)
    dt = torch.bfloat16 if USE_BF16 else torch.float32
    model = Spectrum()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    hist = []
    for i in range(steps):
        x, y = spectra(16)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=USE_BF16):
            out = model(x.to(dt))
        loss = F.cross_entropy(out.float(), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        hist.append(loss.item())
        if (i + 1) % 20 == 0:
            print(f"step {i + 1} loss {sum(hist[-20:]) / 20:.4f}")


train()
