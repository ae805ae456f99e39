import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Stripes(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 4, (n,), generator=g)
        yy, xx = torch.meshgrid(torch.arange(10.0), torch.arange(10.0), indexing="ij")
        waves = torch.stack([torch.sin(yy), torch.sin(xx), torch.sin(xx + yy), torch.sin(xx - yy)])
        self.x = (waves[self.y] + 0.8 * torch.randn(n, 10, 10, generator=g)).unsqueeze(1)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Trainer:
    def __init__(self, model, lr=3e-3):
        self.model = model
        self.crit = nn.CrossEntropyLoss(label_smoothing=0.2)
        self.opt = torch.optim.AdamW(model.parameters(), lr=lr)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, 1e-2, total_steps=125)

    def fit(self, tr, va, epochs):
        for e in range(epochs):
            self.model.train()
            for x, y in tr:
                self.opt.zero_grad()
                loss = self.crit(self.model(x), y)
                loss.backward()
                self.opt.step()
                self.sched.step()
            print(f"epoch {e} loss {loss.item():.4f} acc {self.evaluate(va):.3f}")

    @torch.inference_mode()
    def evaluate(self, va):
        self.model.eval()
        return sum((self.model(x).argmax(1) == y).sum().item() for x, y in va) / len(va.dataset)


torch.manual_seed(24)
net = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
                    nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(24, 4))
Trainer(net).fit(DataLoader(Stripes(800, 0), 32, shuffle=True), DataLoader(Stripes(200, 1), 50), 5)
