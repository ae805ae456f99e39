"""Learn a map between two point clouds by minimising an entropic transport cost."""
import torch
import torch.nn as nn

torch.manual_seed(14)


class Sinkhorn(nn.Module):
    def __init__(self, eps=0.05, iters=8):
        super().__init__()
        self.eps, self.iters = eps, iters

    def forward(self, x, y):
        cost = x.square().sum(1, keepdim=True) + y.square().sum(1) - 2 * x @ y.t()
        cost = cost.clamp(min=0)
        k = torch.exp(-cost / self.eps)
        u = torch.full((x.size(0),), 1.0 / x.size(0), dtype=k.dtype)
        a = u.clone()
        for _ in range(self.iters):
            b = u / (k.t() @ a)
            a = u / (k @ b)
        plan = a.unsqueeze(1) * k * b.unsqueeze(0)
        return (plan * cost).sum()


def clouds(n=48):
    t = torch.rand(n) * 6.283
    src = torch.stack([t.cos(), t.sin()], 1) * 0.5
    t = torch.rand(n) * 6.283
    dst = torch.stack([0.9 * t.cos() + 0.5, 0.4 * t.sin() - 0.3], 1)
    return src, dst


mapper = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
ot = Sinkhorn(eps=0.05)
opt = torch.optim.Adam(mapper.parameters(), lr=1e-2)
for step in range(100):
    src, dst = clouds()
    with torch.autocast("cpu", dtype=torch.float16):
        moved = mapper(src)
        loss = ot(moved, dst.to(moved.dtype))
    opt.zero_grad()
    (loss.float() * 16).backward()
    for p in mapper.parameters():
        p.grad /= 16
    opt.step()
    if step % 10 == 0 or step == 99:
        print(f"step {step} transport {loss.item():.4f}")
