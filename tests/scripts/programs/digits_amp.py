import argparse
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--fp32", action="store_true")
fp32 = ap.parse_args().fp32
torch.manual_seed(3)

net = nn.Sequential(
    nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
    nn.Flatten(), nn.Linear(96, 6))
glyphs = (torch.rand(6, 1, 10, 10) > .6).float()


def get(n=16):
    y = torch.randint(0, 6, (n,))
    return glyphs[y] + .5 * torch.randn(n, 1, 10, 10), y


opt = torch.optim.Adam(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 26, growth_interval=40, enabled=not fp32)
skips = 0
for step in range(80):
    x, y = get()
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.float16, enabled=not fp32):
        out = net(x)
        loss = nn.functional.cross_entropy(out, y)
    scaler.scale(loss).backward()
    s0 = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    skips += int(scaler.get_scale() < s0)
    if step % 8 == 0 or step == 79:
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():g} skipped {skips}")
net.eval()
with torch.no_grad():
    x, y = get(200)
    print("val acc", (net(x).argmax(1) == y).float().mean().item())
