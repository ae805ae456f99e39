import torch
import torch.nn as nn
import torch.nn.functional as F


class CLIPHead(nn.Module):
    def __init__(self, dim=512, out=256):
        super().__init__()
        self.image = nn.Linear(dim, out)
        self.text = nn.Linear(dim, out)
        self.logit_scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, img, txt):
        zi = self.image(img)
        zt = self.text(txt)
        with torch.autocast("cuda", enabled=False):
            sim = zi @ zt.t()  # expect: REGION_ISLAND_STILL_HALF
        logits = self.logit_scale.exp() * sim.float()
        target = torch.arange(len(img), device=img.device)
        return F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)


def train(head, loader):
    head = head.cuda()
    opt = torch.optim.AdamW(head.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for img, txt in loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = head(img.cuda(), txt.cuda())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
