import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(5)
dtype = {"half": torch.float16, "float": torch.float32}[sys.argv[1] if len(sys.argv) > 1 else "half"]


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up = nn.Linear(d, d)
        self.down = nn.Linear(d, d)
        nn.init.orthogonal_(self.up.weight, 1.6)
        nn.init.orthogonal_(self.down.weight, 1.6)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


class Tower(nn.Module):
    def __init__(self, d=32, depth=12):
        super().__init__()
        self.inp = nn.Linear(10, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.norm = nn.LayerNorm(d)
        self.out = nn.Linear(d, 4)

    def forward(self, x):
        h = self.inp(x) * 8
        for b in self.blocks:
            h = b(h)
        return self.out(self.norm(h))


W = torch.randn(10, 4)
model = Tower().to(dtype)
opt = torch.optim.SGD(model.parameters(), lr=0.02)
seen = []
for step in range(100):
    x = torch.randn(16, 10)
    y = (x @ W).argmax(1)
    logits = model(x.to(dtype))
    loss = F.cross_entropy(logits.float(), y)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    seen.append(loss.item())
    if (step + 1) % 20 == 0:
        print(f"step {step + 1} loss {sum(seen[-20:]) / 20:.4f}")
