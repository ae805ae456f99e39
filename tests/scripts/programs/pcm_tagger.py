"""Tag short PCM clips (12 bit) by pitch class with a small 1-D conv net."""
import os
import torch
from torch import nn
import torch.nn.functional as F

LOW = os.environ.get("PRECISION", "fp16") != "fp32"
torch.manual_seed(5)
g = torch.Generator().manual_seed(77)


class ChannelRMS(nn.Module):
    def __init__(self, ch, eps=1e-6):
        super().__init__()
        self.g = nn.Parameter(torch.ones(1, ch, 1))
        self.eps = eps

    def forward(self, x):
        power = x.pow(2).mean(dim=1, keepdim=True)
        return x * torch.rsqrt(power + self.eps) * self.g


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(1, 16, 9, stride=2, padding=4)
        self.n1 = ChannelRMS(16)
        self.c2 = nn.Conv1d(16, 24, 5, stride=2, padding=2)
        self.n2 = ChannelRMS(24)
        self.out = nn.Linear(24, 4)

    def forward(self, x):
        x = F.silu(self.n1(self.stem(x)))
        x = F.silu(self.n2(self.c2(x)))
        return self.out(x.mean(-1))


def clips(n=16, length=96):
    y = torch.randint(0, 4, (n,), generator=g)
    t = torch.arange(length).float()
    ph = torch.rand(n, 1, generator=g) * 6.28
    wav = torch.sin(t[None] * (0.25 + 0.3 * y[:, None].float()) + ph)
    wav = wav + 0.1 * torch.randn(n, length, generator=g)
    return (wav * 1900).round().clamp(-2047, 2047)[:, None], y


def main():
    model = Tagger()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024., enabled=LOW)
    acc = 0.
    for it in range(90):
        x, y = clips()
        with torch.autocast("cpu", dtype=torch.float16, enabled=LOW):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        acc = 0.9 * acc + 0.1 * (logits.argmax(1) == y).float().mean().item()
        if it % 10 == 9:
            print(f"[{it}] ce={loss.item():.3f} acc={acc:.2f}")


if __name__ == "__main__":
    main()
