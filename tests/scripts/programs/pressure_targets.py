import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

TARGET_DTYPE = torch.bfloat16


class Barometer(Dataset):
    def __init__(self, n=2400):
        g = torch.Generator().manual_seed(25)
        self.x = torch.randn(n, 6, generator=g)
        delta = 1.2 * torch.tanh(self.x[:, 0]) + 0.8 * self.x[:, 1] * torch.sigmoid(self.x[:, 2])
        self.pressure = (1013.0 + delta).to(TARGET_DTYPE)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.pressure[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def main():
    torch.manual_seed(25)
    ds = Barometer()
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    ref = 1013.0
    for epoch in range(4):
        tot = 0.0
        for x, p in DataLoader(ds, batch_size=40, shuffle=True):
            loss = F.mse_loss(model(x), p.float() - ref)
            opt.zero_grad()
            loss.backward()
            opt.step()
            tot += loss.item()
        print(f"epoch {epoch} mse {tot / 60:.4f}")
    x = torch.randn(500, 6)
    true = 1.2 * torch.tanh(x[:, 0]) + 0.8 * x[:, 1] * torch.sigmoid(x[:, 2])
    with torch.no_grad():
        print("error against exact pressure", F.mse_loss(model(x), true).item())


main()
