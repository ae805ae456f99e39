import argparse
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--micro-batch", type=int, default=16)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--lr", type=float, default=1e-3)
    return p.parse_args()


class Regressor(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(d, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.layers(x).squeeze(-1)


def dataset(n=1280, d=10):
    x = torch.rand(n, d) * 2 - 1
    y = torch.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * x[:, 3]
    return TensorDataset(x, y)


def main(args):
    torch.manual_seed(0)
    model = Regressor(10)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    loader = DataLoader(dataset(), batch_size=args.micro_batch, shuffle=True)
    lossf = nn.MSELoss()
    n = 0
    for epoch in range(args.epochs):
        for x, y in loader:
            loss = lossf(model(x), y)
            n += 1
            if n % args.accum == 0:
                opt.zero_grad()
                loss.backward()
            opt.step()
            if n % 48 == 0:
                print(f"epoch {epoch} micro {n} loss {loss.item():.4f}")


if __name__ == "__main__":
    main(get_args())
