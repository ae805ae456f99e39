import torch
import torch.nn as nn
import torch.nn.functional as F


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (h * self.weight).to(x.dtype)


class Whiten(nn.Module):
    def forward(self, x):
        x32 = x.to(torch.float32)
        mean = x32.mean(0)
        var = (x32 * x32).mean(0) - mean * mean
        return ((x32 - mean) / (var + 1e-8).sqrt()).type_as(x)


def train(body, loader, dim=256):
    net = nn.Sequential(body, RMSNorm(dim), Whiten(), nn.Linear(dim, 10)).cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(net(x.cuda()), y.cuda())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
