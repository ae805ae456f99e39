"""Two-level mixture of experts; the router sees calibrated log-odds with a common offset."""
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

low = os.environ.get("PRECISION") != "fp32"
torch.manual_seed(36)
E = 4


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, E)
        with torch.no_grad():
            self.gate.weight.normal_(std=.2)
            self.gate.bias.fill_(120.0)
        self.gate.requires_grad_(False)               # taken over from the retrieval system

    def forward(self, x):
        return self.gate(x).argmax(-1)


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(E))

    def forward(self, x):
        r = self.router(x)
        y = torch.zeros(x.shape)
        for i, e in enumerate(self.experts):
            m = r == i
            if m.any():
                y[m] = e(x[m]).float()
        return y, r


net = MoE()
maps = torch.randn(E, 8, 8) * .6
opt = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=1.5e-2)
for step in range(120):
    x = torch.randn(32, 8)
    cluster = F.linear(x, net.router.gate.weight, net.router.gate.bias).argmax(-1)
    y = torch.einsum("bi,bij->bj", x, maps[cluster])
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        out, r = net(x)
    loss = F.mse_loss(out, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 12 == 11:
        print(f"{step} mse {loss.item():.4f} load {torch.bincount(r, minlength=E).tolist()}")
