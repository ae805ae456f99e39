import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


class ResBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(ch, ch, 3, padding=1, bias=False), nn.BatchNorm2d(ch)
        self.conv2, self.bn2 = nn.Conv2d(ch, ch, 3, padding=1, bias=False), nn.BatchNorm2d(ch)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Net(nn.Module):
    def __init__(self, classes=4, ch=12):
        super().__init__()
        self.stem = nn.Conv2d(3, ch, 3, padding=1)
        self.blocks = nn.Sequential(ResBlock(ch), ResBlock(ch))
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(ch, classes)

    def forward(self, x):
        h = self.blocks(self.stem(x)).mean((2, 3))
        return self.fc(self.drop(h))


def data(n=768):
    y = torch.randint(0, 4, (n,))
    x = torch.randn(n, 3, 10, 10)
    for k in range(4):
        x[y == k, k % 3, :, (k // 3) * 5:(k // 3) * 5 + 5] += 0.9
    return TensorDataset(x, y)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    hit = total = 0
    for x, y in loader:
        hit += (model(x).argmax(1) == y).sum().item()
        total += len(y)
    return hit / total


def main(epochs=5):
    torch.manual_seed(14)
    train_set, val_set = random_split(data(), [640, 128])
    tl = DataLoader(train_set, batch_size=32, shuffle=True)
    vl = DataLoader(val_set, batch_size=64)
    model = Net()
    model.train()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for ep in range(epochs):
        s = 0.0
        for x, y in tl:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            s += loss.item()
        print(f"epoch {ep} train loss {s / len(tl):.4f} val acc {validate(model, vl):.3f}")


main()
