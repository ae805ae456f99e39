import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class FrameNet(nn.Module):
    def __init__(self, bands=20, classes=6):
        super().__init__()
        self.conv = nn.Conv1d(bands, 32, 5, padding=2)
        self.bn = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.4)
        self.lin = nn.Linear(32, classes)

    def forward(self, x):
        h = torch.relu(self.bn(self.conv(x)))
        return self.lin(self.drop(h.mean(-1)))


class Experiment:
    def __init__(self, seed=31):
        torch.manual_seed(seed)
        self.patterns = torch.randn(6, 20, 1)
        self.train_loader = DataLoader(self._make(640), batch_size=32, shuffle=True)
        self.val_loader = DataLoader(self._make(160), batch_size=16)
        self.net = FrameNet()
        self.opt = torch.optim.RMSprop(self.net.parameters(), lr=2e-3)
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.05)

    def _make(self, n):
        y = torch.randint(0, 6, (n,))
        return TensorDataset(self.patterns[y] * 0.22 + torch.randn(n, 20, 15), y)

    def epoch(self):
        self.net.train()
        tot = 0.0
        for x, y in self.train_loader:
            loss = self.loss(self.net(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            tot += loss.item()
        return tot / len(self.train_loader)

    def evaluate(self):
        correct = 0
        with torch.no_grad():
            for x, y in self.val_loader:
                correct += (self.net(x).argmax(-1) == y).sum().item()
        return correct / len(self.val_loader.dataset)

    def run(self, epochs):
        for e in range(epochs):
            tr = self.epoch()
            print(f"epoch {e}: loss {tr:.4f} val accuracy {self.evaluate():.3f}")


if __name__ == "__main__":
    Experiment().run(6)
