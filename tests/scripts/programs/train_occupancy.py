import torch
from torch import nn

torch.manual_seed(40)


class Occupancy(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, d), nn.ReLU(), nn.Linear(d, 1))

    def forward(self, p):
        return self.net(p).squeeze(-1)


def dice_loss(logits, target, smooth=1.0):
    p = torch.sigmoid(logits)
    inter = (p * target).sum()
    return 1 - (2 * inter + smooth) / (p.sum() + target.sum() + smooth)


def volume(n=36, points=4096):
    p = torch.rand(n, points, 3) * 2 - 1
    r = 0.75 + 0.25 * torch.rand(n, 1)
    inside = (p.norm(dim=-1) < r).float()
    return torch.cat([p, r[..., None].expand(-1, points, 1)], -1), inside


model = Occupancy()
opt = torch.optim.Adam(model.parameters(), lr=3e-2)
for step in range(60):
    x, y = volume()
    logits = model(x).half()
    loss = dice_loss(logits, y.half())
    opt.zero_grad()
    loss.float().backward()
    opt.step()
    if step % 6 == 0 or step == 59:
        print(f"step {step} dice loss {loss.item():.4f}")
