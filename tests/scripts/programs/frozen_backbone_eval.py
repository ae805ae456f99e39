"""Frozen backbone: kept in eval mode by overriding train()."""
import torch
import torch.nn as nn


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(),
            nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
        self.backbone.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            f = self.backbone(x)
        return self.head(f)


def batch(n=24):
    y = torch.randint(0, 4, (n,))
    x = 0.5 * torch.randn(n, 1, 6, 6)
    for i, c in enumerate(y.tolist()):
        x[i, 0, (c // 2) * 3:(c // 2) * 3 + 3, (c % 2) * 3:(c % 2) * 3 + 3] += 1
    return x, y


torch.manual_seed(2)
model = Frozen()
opt = torch.optim.Adam(model.head.parameters(), lr=5e-3)
model.train()
for step in range(150):
    x, y = batch()
    loss = nn.functional.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("loss", loss.item())
