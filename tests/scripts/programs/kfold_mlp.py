"""Two-fold cross validation of a little MLP on synthetic tabular data."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, Subset

torch.manual_seed(7)
X = torch.randn(320, 12)
y = (X[:, :3].sum(1) + 0.2 * torch.randn(320) > 0).long()
data = TensorDataset(X, y)


def build():
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))


model = build()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
half = len(data) // 2
folds = [range(0, half), range(half, len(data))]
scores = []
for k, val_idx in enumerate(folds):
    if k > 0:
        model = build()
    train_idx = [i for i in range(len(data)) if i not in val_idx]
    loader = DataLoader(Subset(data, train_idx), batch_size=16, shuffle=True)
    for epoch in range(8):
        model.train()
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        xv, yv = X[list(val_idx)], y[list(val_idx)]
        scores.append((model(xv).argmax(1) == yv).float().mean().item())
print("fold accuracies", [round(s, 3) for s in scores])
