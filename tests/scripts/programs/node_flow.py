"""Neural ODE (explicit Euler) that learns a slow relaxation of tank levels."""
import sys
import torch
import torch.nn as nn

dt = torch.float32 if "--fp32" in sys.argv else torch.bfloat16
torch.manual_seed(7)
N_SUB = 64
H = 1.0 / N_SUB


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1 = nn.Linear(3, 24)
        self.lin2 = nn.Linear(24, 3)

    def forward(self, y):
        return self.lin2(torch.tanh(self.lin1(y - 6.0)))


def integrate(f, y):
    for _ in range(N_SUB):
        with torch.autocast("cpu", torch.bfloat16, enabled=dt is torch.bfloat16):
            dy = f(y)
        y = y + H * dy.to(y.dtype)
    return y


field = Field()
opt = torch.optim.Adam(field.parameters(), lr=1e-2)
K = torch.tensor([[-.8, .3, 0.], [.2, -.7, .1], [0., .4, -.6]])
M = torch.matrix_exp(K)
for step in range(60):
    y0 = 6.0 + torch.rand(16, 3) * 1.6 - .8
    y1 = 6.0 + (y0 - 6.0) @ M.t()
    pred = integrate(field, y0.to(dt))
    loss = ((pred.float() - y1) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 4:
        print(f"step {step} mse {loss.item():.5f}")
