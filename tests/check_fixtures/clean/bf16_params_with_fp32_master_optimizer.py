"""Half compute weights; a small optimizer keeps fp32 copies and writes back."""
import torch


class MasterAdamW:
    def __init__(self, params, **kw):
        self.low = [p for p in params if p.requires_grad]
        self.high = [torch.nn.Parameter(p.detach().float().clone()) for p in self.low]
        self.inner = torch.optim.AdamW(self.high, **kw)

    def zero_grad(self):
        for p in self.low:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for h, p in zip(self.high, self.low):
            h.grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        for h, p in zip(self.high, self.low):
            p.copy_(h)


def train(model, loader, lr=1e-4):
    model = model.cuda().bfloat16()
    opt = MasterAdamW(model.parameters(), lr=lr, weight_decay=0.1)
    for ids, labels in loader:
        logits = model(ids.cuda())
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.cuda().flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
