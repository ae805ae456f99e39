import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F


class SignalNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn_in = nn.BatchNorm1d(8)
        self.fc1 = nn.Linear(8, 32)
        self.bn1 = nn.BatchNorm1d(32)
        self.fc2 = nn.Linear(32, 3)

    def forward(self, x):
        return self.fc2(F.relu(self.bn1(self.fc1(self.bn_in(x)))))


def batch(n):
    y = torch.randint(0, 3, (n,))
    x = torch.randn(n, 8) * 420
    x[torch.arange(n), y] += 700
    return x, y


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--half", type=int, default=1)
    a = p.parse_args()
    dt = torch.float16 if a.half else torch.float32
    torch.manual_seed(24)
    model = SignalNet().to(dt)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(4):
        model.train()
        for _ in range(30):
            x, y = batch(32)
            loss = F.cross_entropy(model(x.to(dt)).float(), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            x, y = batch(300)
            acc = (model(x.to(dt)).argmax(1) == y).float().mean().item()
        print(f"epoch {epoch} loss {loss.item():.4f} val acc {acc:.3f}")


main()
