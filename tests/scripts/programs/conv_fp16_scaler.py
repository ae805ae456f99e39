import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--init-scale", type=float, default=2.0 ** 24)
p.add_argument("--steps", type=int, default=120)
args = p.parse_args()
torch.manual_seed(3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.fc = nn.Linear(12, 3)

    def forward(self, x):
        return self.fc(F.relu(self.c2(F.relu(self.c1(x)))).mean((2, 3)))


def batch(n=12):
    y = torch.randint(0, 3, (n,))
    x = torch.randn(n, 1, 8, 8) * 0.4
    x[y == 1] += 1.0
    x[y == 2, :, :, ::2] -= 1.5
    return x, y


net = Net()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=args.init_scale, growth_interval=60)
for step in range(args.steps):
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = F.cross_entropy(out.float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():g}")
