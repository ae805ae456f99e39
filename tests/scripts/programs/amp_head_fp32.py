"""bf16 autocast for the trunk, numerically delicate head on purpose in float32."""
import torch
from torch import nn
torch.manual_seed(29)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 48)); self.head = nn.Linear(48, 1)
    def forward(self, x):
        h = self.trunk(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(h.float())
m = Net(); opt = torch.optim.AdamW(m.parameters(), lr=2e-3); w = torch.randn(24, 1) / 4
for s in range(210):
    x = torch.randn(32, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(m(x), torch.sin(x @ w))
    opt.zero_grad(); loss.backward(); opt.step()
    if s % 50 == 0: print(s, loss.item())
