"""Insurance claims: trunk in fp16, the aggregate likelihood summed in fp32."""
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

half = "--fp32" not in sys.argv
torch.manual_seed(42)


class Claims(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(14, 40), nn.SiLU(), nn.LayerNorm(40), nn.Linear(40, 40), nn.SiLU())
        self.mu = nn.Linear(40, 1)
        nn.init.zeros_(self.mu.bias)

    def forward(self, x):
        with torch.autocast("cpu", torch.float16, enabled=half):
            z = self.mu(self.trunk(x))
        return F.softplus(z.float().squeeze(1)) * 5.0e4


w = torch.randn(14) * .3
model = Claims()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, growth_interval=50, enabled=half)
sum_sq = 0.0
for i in range(100):
    x = torch.randn(32, 14)
    amount = F.softplus(x @ w + 1) * 5.0e4 * torch.exp(.05 * torch.randn(32))
    pred = model(x)
    sq = ((pred - amount) ** 2).sum()                # about 1e10..1e11, fp32
    loss = sq / 2.5e9 / 32
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    sum_sq += sq.item()
    if i % 10 == 9:
        print(f"{i} sq {sq.item():.4g} loss {loss.item():.5f} total so far {sum_sq:.4g} scale {scaler.get_scale():g}")
