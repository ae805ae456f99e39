import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class NCE(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, a, b):
        s = self.q(a) @ self.k(b).t()
        pos = s.diagonal()
        return (torch.logsumexp(s, dim=1) - pos).mean() - F.logsigmoid(pos).float().mean()


@torch.no_grad()
def score(model, a, b):
    model = copy.deepcopy(model).half().eval()
    s = model.q(a.half()) @ model.k(b.half()).t()
    return F.log_softmax(s.float(), dim=-1), torch.logsumexp(s.float(), dim=-1)


def train(loader, dim=128):
    nce = NCE(dim).cuda()
    opt = torch.optim.AdamW(nce.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for a, b in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nce(a.cuda(), b.cuda())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
