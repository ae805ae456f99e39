import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(8)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.BatchNorm2d(24), nn.ReLU())

    def forward(self, x):
        return F.adaptive_avg_pool2d(self.body(self.stem(x)), 1).flatten(1)


def make(n, shift, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    x = torch.randn(n, 3, 12, 12, generator=g) + shift
    x[torch.arange(n), y] += 1.0
    return TensorDataset(x, y)


def pretrain(backbone):
    head = nn.Linear(24, 3)
    opt = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.05, momentum=0.9)
    for x, y in DataLoader(make(960, 0.0, 1), batch_size=32, shuffle=True):
        loss = F.cross_entropy(head(backbone(x)), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"pretrain loss {loss.item():.4f}")


class Classifier(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 3))

    def forward(self, x):
        return self.head(self.backbone(x))


def freeze(module):
    module.eval()
    for p in module.parameters():
        p.requires_grad_(False)


backbone = Backbone()
pretrain(backbone)
model = Classifier(backbone)
freeze(model.backbone)
opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
data = DataLoader(make(960, 1.5, 2), batch_size=32, shuffle=True)
step = 0
for epoch in range(4):
    model.train()
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
    print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
