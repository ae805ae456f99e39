import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 24, 3, stride=2, padding=1)

    def forward(self, x):
        return F.relu(self.conv2(F.relu(self.bn(self.conv(x))))).mean((2, 3))


class Probe(nn.Module):
    def __init__(self, backbone, classes):
        super().__init__()
        self.backbone = backbone
        for p in self.backbone.parameters():
            p.requires_grad_(False)
        self.head = nn.Linear(24, classes)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            f = self.backbone(x)
        return self.head(f)


def make(n):
    y = torch.randint(0, 3, (n,))
    base = torch.randn(n, 1, 12, 12) * 0.3
    base[y == 1, :, ::2] += 1.0
    base[y == 2, :, :, ::3] += 1.0
    return TensorDataset(base, y)


model = Probe(Backbone(), 3)
opt = torch.optim.Adam(model.head.parameters(), lr=2e-2)
tr, va = DataLoader(make(960), 32, shuffle=True), DataLoader(make(192), 64)
for epoch in range(5):
    model.train()
    for x, y in tr:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        acc = sum((model(x).argmax(1) == y).sum().item() for x, y in va) / 192
    print(f"epoch {epoch} loss {loss.item():.4f} val {acc:.3f}")
