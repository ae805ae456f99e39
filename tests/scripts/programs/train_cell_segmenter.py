import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(40)


def cells(n, size=16):
    g = torch.arange(size).float()
    cx, cy, r = torch.rand(3, n, 1, 1)
    d = ((g.view(1, 1, -1) - 3 - 10 * cx) ** 2 + (g.view(1, -1, 1) - 3 - 10 * cy) ** 2).sqrt()
    mask = (d < 2 + 3 * r).float()
    img = mask + 0.3 * torch.randn(n, size, size)
    return img.unsqueeze(1), mask


class SmallUNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.a = nn.Conv2d(1, c, 3, padding=1)
        self.b = nn.Conv2d(c, 2 * c, 3, padding=1, stride=2)
        self.c = nn.Conv2d(2 * c, 2 * c, 3, padding=1)
        self.d = nn.Conv2d(3 * c, c, 3, padding=1)
        self.out = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        a = F.relu(self.a(x))
        b = F.relu(self.c(F.relu(self.b(a))))
        up = F.interpolate(b.float(), scale_factor=2).to(b.dtype)
        return self.out(F.relu(self.d(torch.cat([a, up], 1)))).squeeze(1)


def train(steps=80):
    net = SmallUNet()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(steps):
        img, mask = cells(8)
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(img)
        loss = F.binary_cross_entropy_with_logits(logits.float(), mask)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        if step % 10 == 0 or step == steps - 1:
            pred = (logits > 0).float()
            iou = (pred * mask).sum() / ((pred + mask) > 0).float().sum()
            print(f"step {step} bce {loss.item():.4f} iou {iou.item():.3f}")


train()
