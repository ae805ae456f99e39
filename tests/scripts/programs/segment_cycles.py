import torch
from torch import nn

torch.manual_seed(16)
net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1),
                    nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.1), nn.Conv2d(8, 1, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=30)
yy, xx = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")


def batch(n=4):
    cy, cx = torch.rand(n, 1, 1) * 8 + 2, torch.rand(n, 1, 1) * 8 + 2
    mask = (((yy - cy) ** 2 + (xx - cx) ** 2) < 9).float()
    return (mask + 0.5 * torch.randn(n, 12, 12))[:, None], mask[:, None]


@torch.no_grad()
def iou():
    net.eval()
    x, m = batch(32)
    p = net(x) > 0
    net.train()
    return ((p & (m > 0)).sum() / (p | (m > 0)).sum()).item()


hist = []
for step in range(120):
    x, m = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(x)
    loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), m)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    opt.step()
    sched.step()
    hist.append(loss.item())
    if step % 15 == 14:
        print(f"step {step + 1} loss {sum(hist[-15:]) / 15:.4f} iou {iou():.3f} lr {sched.get_last_lr()[0]:.4f}")
