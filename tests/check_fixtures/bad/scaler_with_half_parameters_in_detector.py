import torch
from torch import nn


class Head(nn.Module):
    def __init__(self, dim, classes):
        super().__init__()
        self.cls = nn.Linear(dim, classes)
        self.anchor_scale = nn.Parameter(torch.ones(classes, dtype=torch.float16))  # expect: HALF_PARAMETERS

    def forward(self, h):
        return self.cls(h) * self.anchor_scale


def train(backbone, loader):
    head = Head(256, 80).cuda()
    opt = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.01)
    scaler = torch.amp.GradScaler("cuda")
    for image, target in loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            logits = head(backbone(image.cuda()))
            loss = nn.functional.binary_cross_entropy_with_logits(logits, target.cuda())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
