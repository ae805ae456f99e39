import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def count_parameters(module):
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def focal(logits, y, gamma=2.0):
    ce = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
    p = torch.exp(-ce)
    return ((1 - p) ** gamma * ce).mean()


def main():
    torch.manual_seed(14)
    x = torch.randn(4000, 8)
    y = (x[:, 0] + x[:, 1] > 2.6).float()
    print("positives", int(y.sum()))
    sampler = WeightedRandomSampler(torch.where(y > 0, 8.0, 1.0), 4000)
    loader = DataLoader(TensorDataset(x, y), 32, sampler=sampler)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    print("parameters", count_parameters(model))
    nn.init.constant_(model[2].bias, -2.0)
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for epoch in range(2):
        for i, (xb, yb) in enumerate(loader):
            loss = focal(model(xb).squeeze(1), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if i % 25 == 0:
                print(f"epoch {epoch} batch {i} focal {loss.item():.6f}")
    with torch.no_grad():
        pred = model(x).squeeze(1) > 0
    print("recall", (pred & (y > 0)).sum().item() / y.sum().item())


main()
