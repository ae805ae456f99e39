import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--dtype", default="fp16", choices=["fp16", "fp32"])
ap.add_argument("--steps", type=int, default=80)
args = ap.parse_args()
DT = torch.float16 if args.dtype == "fp16" else torch.float32
torch.manual_seed(0)
B, T, F_IN, D = 8, 10, 6, 32


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.scale = d ** -0.5

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        return torch.softmax(scores * self.scale, -1) @ self.v(x)


class SensorNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(F_IN, D)
        self.attn = Attention(D)
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, 3)

    def forward(self, x):
        h = self.embed(x)
        return self.head(self.norm(h + self.attn(h)).mean(1))


def batch():
    y = torch.randint(0, 3, (B,))
    x = torch.randn(B, T, F_IN) * 40 + 150
    x[torch.arange(B), :, y] += 120
    return x.to(DT), y


model = SensorNet().to(DT)
opt = torch.optim.SGD(model.parameters(), lr=0.02)
for step in range(args.steps):
    x, y = batch()
    loss = F.cross_entropy(model(x).float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0 or step == args.steps - 1:
        print(f"step {step} loss {loss.item():.4f}")
