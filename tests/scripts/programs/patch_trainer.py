"""Small image-patch classifier with a trainer that logs gradient norms."""
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

USE_AMP = os.environ.get("PRECISION") != "fp32"


class ResBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.b = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)
        self.na, self.nb = nn.GroupNorm(4, c), nn.GroupNorm(4, c)

    def forward(self, x):
        return x + self.b(F.relu(self.nb(self.a(F.relu(self.na(x))))))


class PatchNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.block = ResBlock(16)
        self.fc = nn.Linear(16 * 4, 4)

    def forward(self, x):
        h = F.avg_pool2d(self.block(self.stem(x)), 4)
        return self.fc(h.flatten(1))


class GradLogger:
    def __init__(self, scaler, optimizer):
        self.scaler, self.optimizer, self.norms = scaler, optimizer, []

    def __call__(self):
        self.scaler.unscale_(self.optimizer)
        ps = [p for g in self.optimizer.param_groups for p in g["params"]]
        self.norms.append(torch.stack([p.grad.norm() for p in ps]).norm().item())


class Loop:
    def __init__(self, net):
        self.net = net
        self.optim = torch.optim.SGD(net.parameters(), lr=0.08, momentum=0.9, nesterov=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, enabled=USE_AMP)
        self.log = GradLogger(self.scaler, self.optim)

    def step(self, x, y):
        self.optim.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=USE_AMP):
            loss = F.cross_entropy(self.net(x), y)
        self.scaler.scale(loss).backward()
        self.log()
        inv = 1.0 / self.scaler.get_scale()
        for p in self.net.parameters():
            p.grad.mul_(inv)
        nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)
        self.scaler.step(self.optim)
        self.scaler.update()
        return loss.item()


def patches(n):
    y = torch.randint(0, 4, (n,))
    x = .6 * torch.randn(n, 1, 8, 8)
    for i, c in enumerate(y.tolist()):
        x[i, 0, 4 * (c // 2):4 * (c // 2) + 4, 4 * (c % 2):4 * (c % 2) + 4] += 1.0
    return x, y


if __name__ == "__main__":
    torch.manual_seed(8)
    loop = Loop(PatchNet())
    for s in range(60):
        l = loop.step(*patches(16))
        print(f"step {s} loss {l:.4f} |g| {loop.log.norms[-1]:.3f}")
