import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, n=2400):
        g = torch.Generator().manual_seed(4)
        self.proto = torch.randn(30, 16, generator=g)
        self.items = self.proto.repeat_interleave(20, 0) + 0.3 * torch.randn(600, 16, generator=g)
        self.i = torch.randint(0, 600, (n,), generator=g)
        same = torch.randint(0, 20, (n,), generator=g) + self.i // 20 * 20
        other = torch.randint(0, 600, (n,), generator=g)
        self.j = torch.where(torch.rand(n, generator=g) < 0.5, same, other)
        self.j[:800] = torch.where(self.j[:800] == self.i[:800], (self.i[:800] + 1) % 600, self.j[:800])

    def __len__(self):
        return len(self.i)

    def __getitem__(self, k):
        i, j = self.i[k], self.j[k]
        return self.items[i], self.items[j], (i // 20 == j // 20).float()


class Metric(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8, bias=False))

    def forward(self, a, b):
        d = self.net(a) - self.net(b)
        return torch.sqrt((d * d).sum(1))


def main():
    torch.manual_seed(19)
    model = Metric()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step, (a, b, y) in enumerate(DataLoader(Pairs(), batch_size=16)):
        dist = model(a, b)
        loss = (y * dist + (1 - y) * F.relu(2.0 - dist)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
