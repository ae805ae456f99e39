import torch
import torch.nn.functional as F
from torch import nn


def neg_inf(x):
    return torch.finfo(x.dtype).min


class MaskedPool(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.score = nn.Linear(dim, 1)

    def forward(self, x, pad):
        s = self.score(x).squeeze(-1)
        s = s.masked_fill(pad, neg_inf(s))
        w = F.softmax(s, dim=-1)
        return torch.einsum("bn,bnd->bd", w, x)


def train(loader, dim=64):
    pool, cls = MaskedPool(dim).cuda(), nn.Linear(dim, 2).cuda()
    opt = torch.optim.AdamW([*pool.parameters(), *cls.parameters()], lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for x, pad, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(cls(pool(x.cuda(), pad.cuda())), y.cuda())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
