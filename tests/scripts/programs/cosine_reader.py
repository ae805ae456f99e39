"""Slot memory reader with cosine attention, trained on loudness-augmented frames."""
import argparse
import torch
import torch.nn as nn

ap = argparse.ArgumentParser()
ap.add_argument("--fp32", action="store_true")
ap.add_argument("--steps", type=int, default=60)
args = ap.parse_args()
torch.manual_seed(11)


class CosineReader(nn.Module):
    def __init__(self, d_in=24, d=32):
        super().__init__()
        self.to_q = nn.Linear(d_in, d, bias=False)
        self.to_k = nn.Linear(d_in, d, bias=False)
        self.to_v = nn.Linear(d_in, d)
        self.sharp = nn.Parameter(torch.tensor(8.0))

    def forward(self, x, mem):
        q, k = self.to_q(x), self.to_k(mem)
        v = self.to_v(mem / mem.norm(dim=-1, keepdim=True))
        num = torch.matmul(q, k.transpose(-1, -2))
        den = q.norm(dim=-1)[:, :, None] * k.norm(dim=-1)[:, None, :].float()
        att = torch.softmax(num / den * self.sharp, dim=-1)
        return att @ v


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.reader = CosineReader()
        self.post = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 6))

    def forward(self, x, mem):
        return self.post(self.reader(x, mem)).mean(1)


protos = torch.randn(6, 24)


def batch(step, n=16):
    y = torch.randint(0, 6, (n,))
    frames = protos[y][:, None] + 0.7 * torch.randn(n, 5, 24)
    mem = protos[y][:, None] + 0.7 * torch.randn(n, 9, 24)
    gain = 1.0 + 2.0 * step            # loudness curriculum
    return frames * gain, mem * gain, y


net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12, enabled=not args.fp32)
for step in range(args.steps):
    fr, mem, y = batch(step)
    opt.zero_grad()
    with torch.autocast("cpu", torch.float16, enabled=not args.fp32):
        out = net(fr, mem)
        loss = nn.functional.cross_entropy(out, y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():g}")
