import torch
import torch.nn as nn
import torch.nn.functional as F


def count_parameters(module):
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


torch.manual_seed(1)


class Scaled(nn.Module):
    def __init__(self, d=12, h=48):
        super().__init__()
        self.inp = nn.Linear(d, h)
        self.mid = nn.Linear(h, h)
        self.norm = nn.LayerNorm(h)
        self.out = nn.Linear(h, 4)

    def forward(self, x):
        h = F.relu(self.inp(x))
        h = h + F.relu(self.mid(h))
        return self.out(self.norm(h))


W = torch.randn(12, 4)
model = Scaled()
print("parameters", count_parameters(model))
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
hist = []
for step in range(150):
    x = torch.randn(16, 12) * 8000
    y = (x @ W).argmax(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    hist.append(loss.item())
    if (step + 1) % 25 == 0:
        print(f"step {step + 1} loss {sum(hist[-25:]) / 25:.4f}")
