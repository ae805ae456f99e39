"""Fit a growth curve ensemble with L-BFGS and a closure (population numbers up to 1e5)."""
import os
import torch
import torch.nn as nn

mode = torch.float32 if os.environ.get("PRECISION") == "fp32" else torch.bfloat16
torch.manual_seed(2)
t = torch.linspace(0, 10, 40)
rate = torch.tensor([.6, .9, 1.3])
pop = 9.0e4 / (1 + torch.exp(-rate[:, None] * (t - 5.0))) * (1 + .01 * torch.randn(3, 40))


class Logistic(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_k = nn.Parameter(torch.full((3,), 10.5))
        self.r = nn.Parameter(torch.full((3,), .5))
        self.mid = nn.Parameter(torch.full((3,), 4.0))

    def forward(self, t):
        return torch.exp(self.log_k)[:, None] * torch.sigmoid(self.r[:, None] * (t - self.mid[:, None]))


model = Logistic()
opt = torch.optim.LBFGS(model.parameters(), lr=.5, max_iter=4, line_search_fn="strong_wolfe")
calls = 0


def closure():
    global calls
    calls += 1
    opt.zero_grad()
    with torch.autocast("cpu", mode, enabled=mode is not torch.float32):
        res = model(t) - pop
    loss = (res ** 2).mean() / 1e8
    loss.backward()
    return loss


for step in range(40):
    l = opt.step(closure)
    if step % 4 == 0 or step == 39:
        print(f"step {step} loss {l.item():.6f} sse {((model(t) - pop) ** 2).sum().item():.4g} calls {calls}")
