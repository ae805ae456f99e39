import torch
from torch import nn

torch.manual_seed(55)
N = 3000
users = torch.arange(N) % 1500
items = torch.randint(0, 40, (N,))
taste = torch.randn(1500, 4)
style = torch.randn(40, 4)
ratings = (taste[users] * style[items]).sum(-1) / 2
priority = torch.rand(N) + 0.5


@torch.no_grad()
def draw(n, dtype=torch.bfloat16):
    cdf = torch.cumsum(priority / priority.sum(), 0).to(dtype)
    u = torch.rand(n).to(dtype)
    return torch.searchsorted(cdf, u).clamp(max=N - 1)


class MF(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.u = nn.Embedding(1500, d)
        self.i = nn.Embedding(40, d)
        self.mix = nn.Linear(d, 1)

    def forward(self, a, b):
        return self.mix(self.u(a) * self.i(b)).squeeze(-1)


model = MF()
opt = torch.optim.Adam(model.parameters(), lr=3e-2)
for step in range(200):
    idx = draw(128)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(users[idx], items[idx])
    loss = nn.functional.mse_loss(pred.float(), ratings[idx])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 0 or step == 199:
        with torch.no_grad():
            full = nn.functional.mse_loss(model(users, items), ratings).item()
        print(f"step {step} loss {loss.item():.4f} all ratings {full:.4f}")
