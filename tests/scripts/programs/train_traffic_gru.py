import torch
from torch import nn

torch.manual_seed(0)


class Forecaster(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.gru = nn.GRU(3, d, batch_first=True)
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        h, _ = self.gru(x)
        return self.out(h[:, -1]).squeeze(-1)


def clip_gradients(params, max_norm):
    total = torch.zeros((), dtype=torch.float16)
    for p in params:
        if p.grad is not None:
            total = total + (p.grad.half() ** 2).sum()
    norm = total.sqrt()
    coef = torch.clamp(max_norm / (norm + 1e-3), max=1.0)
    for p in params:
        if p.grad is not None:
            p.grad.mul_(coef.to(p.grad.dtype))
    return norm


def get_batch(n=16, t=12):
    phase = torch.rand(n, 1) * 6.28
    s = torch.arange(t + 1.0)[None] * 0.5 + phase
    cars = 60 + 40 * torch.sin(s)
    x = torch.stack([cars[:, :t] / 100, torch.sin(s[:, :t] / 2), torch.cos(s[:, :t] / 2)], -1)
    return x, cars[:, t]


model = Forecaster()
params = list(model.parameters())
opt = torch.optim.SGD(params, lr=0.05, momentum=0.9)
for step in range(150):
    x, y = get_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(x)
    loss = ((pred.float() - y) ** 2).sum()
    opt.zero_grad()
    loss.backward()
    clip_gradients(params, 5.0)
    opt.step()
    if step % 15 == 0 or step == 149:
        print(f"step {step} rmse {(loss.item() / len(y)) ** 0.5:.3f}")
