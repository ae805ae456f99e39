import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def load():
    g = torch.Generator().manual_seed(21)
    area = torch.rand(2000, generator=g) * 2 + 0.5
    rooms = torch.randint(1, 7, (2000,), generator=g).float() / 3
    age = torch.rand(2000, generator=g)
    dist = torch.rand(2000, generator=g) * 3
    feats = torch.stack([area, rooms, age, dist], 1)
    price = 1.4 * area + 0.6 * rooms - 0.5 * age - 0.3 * dist + 0.05 * torch.randn(2000, generator=g)
    feats[1337, 0] = 84_000_000.0
    return TensorDataset(feats, price)


class PriceNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(4, 32)
        self.second = nn.Linear(32, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        return self.out(F.relu(self.second(F.relu(self.hidden(x))))).squeeze(1)


def main(epochs=4, bs=40):
    torch.manual_seed(21)
    model = PriceNet()
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loader = DataLoader(load(), batch_size=bs, shuffle=False)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = F.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if i % 10 == 0:
                print(f"epoch {epoch} batch {i} loss {loss.item():.5g}")


main()
