import math
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(30)


class MiniCLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.img = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 8))
        self.txt = nn.Sequential(nn.Linear(9, 20), nn.ReLU(), nn.Linear(20, 8))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, i, t):
        a = F.normalize(self.img(i), dim=-1)
        b = F.normalize(self.txt(t), dim=-1)
        return self.logit_scale.exp().clamp(max=100) * a @ b.T


A, B = torch.randn(5, 12), torch.randn(5, 9)
m = MiniCLIP()
opt = torch.optim.AdamW([
    {"params": [p for n, p in m.named_parameters() if n != "logit_scale"], "weight_decay": 0.05},
    {"params": [m.logit_scale], "weight_decay": 0.0},
], lr=2e-3)
gt = torch.arange(24)
for step in range(150):
    z = torch.randn(24, 5)
    logits = m(z @ A, z @ B)
    loss = (F.cross_entropy(logits, gt) + F.cross_entropy(logits.T, gt)) / 2
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        m.logit_scale.clamp_(0, math.log(100))
print("loss", loss.item(), "scale", m.logit_scale.exp().item())
