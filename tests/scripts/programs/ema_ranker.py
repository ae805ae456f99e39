"""Ranking model for click logs. The averaged copy used for serving is kept in bf16 to save memory."""
import copy
import torch
from torch import nn

torch.manual_seed(83)


class Ranker(nn.Module):
    def __init__(self, d=64, h=512):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, 1))

    def forward(self, x):
        return self.net(x)[:, 0]


class Averager:
    def __init__(self, model, decay=0.999, dtype=torch.bfloat16):
        self.model = copy.deepcopy(model).to(dtype).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for a, p in zip(self.model.parameters(), model.parameters()):
            a.mul_(self.decay).add_(p.to(a.dtype), alpha=1 - self.decay)


model = Ranker()
avg = Averager(model)
opt = torch.optim.Adam(model.parameters(), lr=3e-4)
w = torch.randn(64)
for step in range(900):
    x = torch.randn(64, 64)
    loss = nn.functional.binary_cross_entropy_with_logits(model(x), (x @ w > 0).float())
    opt.zero_grad()
    loss.backward()
    opt.step()
    avg.update(model)
    if step % 150 == 149:
        with torch.no_grad():
            xv = torch.randn(512, 64)
            yv = (xv @ w > 0)
            dt = avg.model.net[0].weight.dtype
            print(step, "live", ((model(xv) > 0) == yv).float().mean().item(),
                  "averaged", ((avg.model(xv.to(dt)) > 0) == yv).float().mean().item())
