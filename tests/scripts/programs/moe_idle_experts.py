import torch
from torch import nn
import torch.nn.functional as F


class MoE(nn.Module):
    """top-1 routing; an expert without tokens is not called"""
    def __init__(self, d=8, n=6):
        super().__init__()
        self.gate = nn.Linear(d, n)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, 12), nn.ReLU(), nn.Linear(12, d)) for _ in range(n))
        self.out = nn.Linear(d, 2)

    def forward(self, x):
        logits = self.gate(x)
        if self.training:  # noisy routing
            logits = logits + 0.5 * torch.randn_like(logits)
        p = logits.softmax(-1)
        w, idx = p.max(-1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            sel = (idx == e).nonzero().squeeze(1)
            if len(sel):
                y = y.index_add(0, sel, expert(x[sel]) * w[sel, None])
        frac = F.one_hot(idx, p.shape[1]).float().mean(0)
        return self.out(x + y), (frac * p.mean(0)).sum() * p.shape[1]


torch.manual_seed(6)
net = MoE()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
centers = torch.randn(6, 8) * 1.5
for step in range(200):
    c = torch.randint(0, 6, (12,))
    x = centers[c] + 0.3 * torch.randn(12, 8)
    logits, balance = net(x)
    loss = F.cross_entropy(logits, c % 2) + 0.02 * balance
    opt.zero_grad()
    loss.backward()
    opt.step()
print("loss", loss.item())
