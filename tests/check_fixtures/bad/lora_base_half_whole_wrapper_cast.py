"""Low-rank adapters; the whole wrapper is cast, so the adapters become bf16 as well."""
import torch
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank=8, alpha=16):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * self.up(self.down(x))


def wrap(model):
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear):
            setattr(model, name, LoRALinear(child))
        else:
            wrap(child)
    return model


def finetune(model, loader):
    model = wrap(model).cuda()
    model = model.bfloat16()  # expect: HALF_CALL
    trainable = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(trainable, lr=2e-5)
    for ids, labels in loader:
        logits = model(ids.cuda())
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.cuda().flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
