"""Mixture of experts: the router is meant to be fp32."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Router(nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, dim) * dim**-0.5)

    def forward(self, tokens):
        with torch.amp.autocast(device_type="cuda", enabled=False):
            logits = tokens @ self.weight.to(tokens.dtype).t()  # expect: REGION_ISLAND_STILL_HALF
        return logits.float()


class MoE(nn.Module):
    def __init__(self, dim=256, experts=8):
        super().__init__()
        self.pre = nn.Linear(dim, dim)
        self.router = Router(dim, experts)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(experts))

    def forward(self, x):
        h = self.pre(x)
        gate, index = F.softmax(self.router(h), dim=-1).max(dim=-1)
        out = torch.stack([e(h) for e in self.experts], dim=-2)
        picked = out.gather(-2, index[..., None, None].expand(*index.shape, 1, h.size(-1))).squeeze(-2)
        return x + gate[..., None] * picked


def train(loader):
    net, head = MoE().cuda(), nn.Linear(256, 1000).cuda()
    opt = torch.optim.AdamW([*net.parameters(), *head.parameters()], lr=1e-4)
    for x, y in loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(head(net(x.cuda())).flatten(0, 1), y.cuda().flatten())
        loss.backward()
        opt.step()
