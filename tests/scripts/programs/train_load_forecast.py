"""Recurrent forecaster for an hourly load curve."""
import torch
import torch.nn as nn

torch.manual_seed(50)


class StateCell(nn.Module):
    def __init__(self, n_in, n_hid):
        super().__init__()
        self.inp = nn.Linear(n_in, n_hid)
        self.rec = nn.Linear(n_hid, n_hid, bias=False)
        nn.init.orthogonal_(self.rec.weight, gain=1.6)

    def forward(self, x, h):
        return torch.relu(self.inp(x) + self.rec(h))


class Forecaster(nn.Module):
    def __init__(self, hid=32):
        super().__init__()
        self.cell = StateCell(1, hid)
        self.out = nn.Linear(hid, 1)
        self.hid = hid

    def forward(self, x):
        h = x.new_zeros(x.size(0), self.hid)
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
        return self.out(h)


def curves(n, length=48):
    t0 = torch.rand(n, 1) * 24
    t = t0 + torch.arange(length + 1)
    y = torch.sin(t * 6.283 / 24) + 0.3 * torch.sin(t * 6.283 / 12) + 0.05 * torch.randn(n, length + 1)
    return y[:, :-1].unsqueeze(-1), y[:, -1:]


model = Forecaster()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    x, y = curves(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 6 == 0 or step == 59:
        print(f"step {step} mse {loss.item():.4g}")
