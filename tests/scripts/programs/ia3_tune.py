"""Tune only the (IA)^3-style channel gains of a frozen bf16 encoder."""
import argparse
import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--fp32", action="store_true")
parser.add_argument("--lr", type=float, default=1.5e-3)
opts = parser.parse_args()
DT = torch.float32 if opts.fp32 else torch.bfloat16
torch.manual_seed(2)


class Gain(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.vec = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return x * self.vec


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 2 * d)
        self.gain = Gain(2 * d)
        self.down = nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(self.gain(torch.relu(self.up(self.norm(x)))))


class Encoder(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.inp = nn.Linear(12, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(3))
        self.outgain = Gain(d)
        self.out = nn.Linear(d, 5)

    def forward(self, x):
        h = self.inp(x)
        for l in self.layers:
            h = l(h)
        return self.out(self.outgain(h))


base = Encoder()
target = Encoder()
target.load_state_dict(base.state_dict())
with torch.no_grad():                       # the task: same network, other gains
    for n, p in target.named_parameters():
        if n.endswith("vec"):
            p.add_(torch.randn_like(p) * .35)
for n, p in base.named_parameters():
    p.requires_grad_(n.endswith("vec"))
base.to(DT)
optimizer = torch.optim.AdamW([p for p in base.parameters() if p.requires_grad], lr=opts.lr, weight_decay=0.0)
data = torch.randn(512, 12)
with torch.no_grad():
    label = target(data)
first = None
for step in range(120):
    idx = torch.randint(0, 512, (32,))
    loss = (base(data[idx].to(DT)).float() - label[idx]).pow(2).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 10 == 0 or step == 119:
        print(f"step {step:3d} mse {loss.item():.5f}")
with torch.no_grad():
    print("full mse", (base(data.to(DT)).float() - label).pow(2).mean().item())
