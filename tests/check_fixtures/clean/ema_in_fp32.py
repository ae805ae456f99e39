import copy

import torch
import torch.nn.functional as F


class EMA:
    def __init__(self, model, decay=0.999):
        self.decay = decay
        self.model = copy.deepcopy(model).float().eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.model.parameters(), model.parameters()):
            e.mul_(self.decay).add_(p.float(), alpha=1 - self.decay)
        for e, b in zip(self.model.buffers(), model.buffers()):
            e.copy_(b)

    def export(self, path):
        torch.save(copy.deepcopy(self.model).half().state_dict(), path)


def fit(model, loader, steps):
    model.cuda()
    ema, opt = EMA(model), torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _, (x, y) in zip(range(steps), loader):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        ema.update(model)
    ema.export("ema_fp16.pt")
