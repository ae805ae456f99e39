import copy

import torch
import torch.nn.functional as F


class EMA:
    def __init__(self, model, decay=0.9999):
        self.decay = decay
        self.shadow = copy.deepcopy(model).half().eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.shadow.parameters(), model.parameters()):
            e.mul_(self.decay).add_(p.detach().to(e.dtype), alpha=1 - self.decay)  # expect: HALF_ACCUMULATOR


def train(model, loader, steps):
    model.cuda()
    ema = EMA(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for _, (x, y) in zip(range(steps), loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        ema.update(model)
    return ema.shadow
