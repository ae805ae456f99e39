import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset


def build():
    return nn.Sequential(nn.Linear(9, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))


def train_fold(ds, tr, va, epochs=5):
    model = build()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(epochs):
        model.train()
        for x, y in DataLoader(Subset(ds, tr), 32, shuffle=True, drop_last=True):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
    model.eval()
    with torch.no_grad():
        x, y = next(iter(DataLoader(Subset(ds, va), len(va))))
        return loss.item(), (model(x).argmax(1) == y).float().mean().item()


def main(k=5):
    torch.manual_seed(18)
    x = torch.randn(400, 9)
    y = ((x[:, 0] + x[:, 1] * x[:, 2]) > 0).long()
    ds = TensorDataset(x, y)
    perm = torch.randperm(len(ds))
    folds = perm.chunk(k)
    accs = []
    for i in range(k):
        va = folds[i].tolist()
        tr = torch.cat([f for j, f in enumerate(folds) if j != i]).tolist()
        loss, acc = train_fold(ds, tr, va)
        accs.append(acc)
        print(f"fold {i} train loss {loss:.4f} val acc {acc:.3f}")
    print(f"mean accuracy {sum(accs) / k:.3f}")


main()
