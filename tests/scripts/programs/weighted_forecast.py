import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Series(Dataset):
    def __init__(self, n=3000, window=16):
        t = torch.arange(n + window + 1, dtype=torch.float32)
        self.v = torch.sin(t / 7) + 0.5 * torch.sin(t / 23) + 0.05 * torch.randn(len(t))
        self.window, self.n = window, n
        self.weight = 0.5 + torch.rand(n)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        w = self.window
        return self.v[i:i + w, None], self.v[i + w], self.weight[i]


class Forecaster(nn.Module):
    def __init__(self, h=24):
        super().__init__()
        self.rnn = nn.RNN(1, h, batch_first=True)
        self.drop = nn.Dropout(0.05)
        self.fc = nn.Linear(h, 1)

    def forward(self, x):
        y, _ = self.rnn(x)
        return self.fc(self.drop(y[:, -1])).squeeze(-1)


def weighted_mse(pred, y, w):
    return (w * (pred - y) ** 2).sum() / w.sum().clamp(min=1.0)


def checkpoint(model, opt, i, store):
    opt.zero_grad(set_to_none=False)
    store[i] = {k: v.clone() for k, v in model.state_dict().items()}
    print(f"checkpoint at batch {i}")


def run():
    torch.manual_seed(6)
    data = DataLoader(Series(), batch_size=16, shuffle=False)
    model = Forecaster()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    avg, store = 0.0, {}
    for i, (x, y, w) in enumerate(data):
        opt.zero_grad()
        loss = weighted_mse(model(x), y, w)
        loss.backward()
        if i and i % 150 == 0:
            checkpoint(model, opt, i, store)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        avg = loss.item() if i == 0 else 0.9 * avg + 0.1 * loss.item()
        if i % 25 == 0:
            print(f"batch {i} loss {loss.item():.5f} avg {avg:.5f}")


run()
