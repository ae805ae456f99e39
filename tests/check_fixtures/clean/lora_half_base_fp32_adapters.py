import torch
from torch import nn


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False).to(torch.bfloat16)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.01)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        low = (x.float() @ self.a.t()) @ self.b.t()
        return self.base(x) + low.to(x.dtype)


def finetune(model, loader):
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear):
            setattr(model, name, LoRA(child))
    model.cuda()
    adapters = [p for n, p in model.named_parameters() if n.endswith((".a", ".b"))]
    opt = torch.optim.AdamW(adapters, lr=1e-4)
    for x, y in loader:
        out = model(x.cuda().to(torch.bfloat16))
        loss = nn.functional.cross_entropy(out.float(), y.cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
