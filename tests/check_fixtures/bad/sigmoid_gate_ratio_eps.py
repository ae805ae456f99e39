import torch
import torch.nn as nn
import torch.nn.functional as F


class SoftIoU(nn.Module):
    eps = 1e-8

    def forward(self, logits, mask):
        p = logits.sigmoid()
        inside = mask > 0.5
        inter = torch.where(inside, p, torch.zeros_like(p)).mean((1, 2))
        union = torch.where(inside, torch.ones_like(p), p).mean((1, 2))
        return 1 - (inter / (union + self.eps)).mean()  # expect: NUM_EPS_UNDERFLOW


def train(seg, loader):
    seg = seg.cuda()
    crit = SoftIoU()
    opt = torch.optim.AdamW(seg.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for image, mask in loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            feats = seg.backbone(image.cuda())
            logits = F.conv2d(feats, seg.head_weight).squeeze(1)
            loss = crit(logits, mask.cuda())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
