import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Glyphs(Dataset):
    def __init__(self, n=800, seed=0):
        g = torch.Generator().manual_seed(seed)
        proto = (torch.rand(10, 1, 10, 10, generator=g) > 0.6).float()
        self.y = torch.randint(0, 10, (n,), generator=g)
        self.x = proto[self.y] + 0.4 * torch.randn(n, 1, 10, 10, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1)
        self.fc1 = nn.Linear(24 * 25, 48)
        self.fc2 = nn.Linear(48, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.conv2(x))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def main():
    torch.manual_seed(0)
    train_set, test_set = Glyphs(800), Glyphs(800)
    test_set.x = test_set.x + 0.4 * torch.randn_like(test_set.x)
    loader = DataLoader(train_set, batch_size=32, shuffle=False)
    model = CNN()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.train()
    for step in range(150):
        x, y = next(iter(loader))
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 15 == 0:
            print(f"step {step} loss {loss.item():.5f}")
    model.eval()
    with torch.no_grad():
        acc = (model(test_set.x).argmax(1) == test_set.y).float().mean().item()
    print(f"test accuracy {acc:.3f}")


if __name__ == "__main__":
    main()
