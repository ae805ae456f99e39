import torch
import torch.nn as nn
import torch.nn.functional as F


class DiceBCE(nn.Module):
    def forward(self, logits, target):
        with torch.autocast("cuda", enabled=False):
            prob = torch.sigmoid(logits.float())
            bce = F.binary_cross_entropy(prob, target.float())
            inter = (prob * target).sum((1, 2, 3))
            union = prob.sum((1, 2, 3)) + target.sum((1, 2, 3))
            dice = 1 - ((2 * inter + 1) / (union + 1)).mean()
        return bce + dice


def train(unet, loader):
    criterion = DiceBCE()
    opt = torch.optim.AdamW(unet.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for image, mask in loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(unet(image.cuda()), mask.cuda())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
