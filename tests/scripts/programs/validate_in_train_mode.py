import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Classifier(nn.Module):
    def __init__(self, n_features, n_classes, p=0.4):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(n_features, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(p),
            nn.Linear(32, 16), nn.ReLU(), nn.Dropout(p),
        )
        self.head = nn.Linear(16, n_classes)

    def forward(self, x):
        return self.head(self.body(x))


def train_epoch(model, loader, opt, crit):
    model.train()
    for x, y in loader:
        opt.zero_grad()
        crit(model(x), y).backward()
        opt.step()


def validate(model, loader, crit):
    total, n = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            total += crit(model(x), y).item() * len(y)
            n += len(y)
    return total / n


if __name__ == "__main__":
    torch.manual_seed(64)
    x = torch.randn(500, 10)
    y = (x @ torch.randn(10, 3)).argmax(1)
    tr, va = random_split(TensorDataset(x, y), [400, 100])
    tr_loader = DataLoader(tr, batch_size=20, shuffle=True)
    va_loader = DataLoader(va, batch_size=50)
    model = Classifier(10, 3)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    crit = nn.CrossEntropyLoss()
    best = float("inf")
    for epoch in range(7):
        train_epoch(model, tr_loader, opt, crit)
        best = min(best, validate(model, va_loader, crit))
    print("best val loss", round(best, 4))
