import torch
import torch.nn as nn
import torch.nn.functional as F


def count_parameters(module):
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


torch.manual_seed(6)


class CLIPish(nn.Module):
    def __init__(self):
        super().__init__()
        self.img = nn.Sequential(nn.Linear(20, 48), nn.GELU(), nn.Linear(48, 16))
        self.txt = nn.Sequential(nn.Linear(14, 48), nn.GELU(), nn.Linear(48, 16))
        self.logit_scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, a, b):
        a, b = F.normalize(self.img(a).float(), dim=-1), F.normalize(self.txt(b).float(), dim=-1)
        return a @ b.t() * self.logit_scale.clamp(max=4.6).exp()


P, Q = torch.randn(8, 20), torch.randn(8, 14)
model = CLIPish()
print("parameters", count_parameters(model))
opt = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
target = torch.arange(16)
hist = []
for step in range(200):
    z = torch.randn(16, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(z @ P + 0.1 * torch.randn(16, 20), z @ Q + 0.1 * torch.randn(16, 14))
    logits = logits.float()
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
    opt.zero_grad()
    loss.backward()
    opt.step()
    hist.append(loss.item())
    if (step + 1) % 25 == 0:
        print(f"step {step + 1} loss {sum(hist[-25:]) / 25:.4f} scale {model.logit_scale.exp().item():.1f}")
