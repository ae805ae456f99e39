"""Keypoint heatmaps; step helper shared by several experiments."""
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

fp32 = "--fp32" in sys.argv
torch.manual_seed(66)


def amp_update(model, opt, compute, scaler=None):
    scaler = scaler or torch.amp.GradScaler("cpu", init_scale=2.0 ** 24, enabled=not fp32)
    with torch.autocast("cpu", torch.float16, enabled=not fp32):
        loss = compute()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(opt)
    scaler.update()
    return loss.item()


net = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(),
                    nn.Conv2d(12, 1, 3, padding=1))
opt = torch.optim.Adam(net.parameters(), lr=4e-3)
yy, xx = torch.meshgrid(torch.arange(12.), torch.arange(12.), indexing="ij")
for step in range(60):
    c = torch.rand(12, 2) * 8 + 2
    blob = torch.exp(-((yy - c[:, :1, None]) ** 2 + (xx - c[:, 1:, None]) ** 2) / 3)[:, None]
    img = (blob > .5).float() + .2 * torch.randn(12, 1, 12, 12)
    l = amp_update(net, opt, lambda: F.mse_loss(net(img).flatten(1).softmax(1) * 10, blob.flatten(1) / blob.flatten(1).sum(1, keepdim=True) * 10))
    if step % 6 == 5:
        print(f"step {step} loss {l:.5f}")
