"""-1e9 is well inside the bf16 range."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Scorer(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.a = nn.Linear(dim, dim)
        self.b = nn.Linear(dim, dim)

    def forward(self, x, mask):
        scores = self.a(x) @ self.b(x).transpose(1, 2)
        scores = scores.masked_fill(mask, -1e9)
        return F.log_softmax(scores, dim=-1)


def train(loader):
    net = Scorer().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for x, mask, target in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logp = net(x.cuda(), mask.cuda())
            loss = F.nll_loss(logp.flatten(0, 1), target.cuda().flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
