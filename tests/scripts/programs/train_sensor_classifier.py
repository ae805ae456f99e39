import torch
import torch.nn as nn

torch.manual_seed(60)
C, LEN = 5, 32


def windows(n):
    y = torch.randint(0, C, (n,))
    t = torch.arange(LEN).float()
    ph = torch.rand(n, 1) * 6.283
    x = torch.sin(t * (0.2 + 0.15 * y.unsqueeze(1)) + ph) + 0.2 * torch.randn(n, LEN)
    return x.unsqueeze(1), y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 16, 7, padding=3), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(16, 32, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.head = nn.Linear(32, C)

    def forward(self, x):
        return self.head(self.body(x))


class Trainer:
    ACCUM = 2

    def __init__(self):
        self.net = Net()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=5e-3)
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.opt, gamma=0.85)

    def run_epoch(self, epoch, batches=20):
        total = hits = 0.0
        for i in range(batches):
            x, y = windows(8)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = self.net(x)
            loss = nn.functional.cross_entropy(out.float(), y)
            (loss / self.ACCUM).backward()
            if (i + 1) % self.ACCUM == 0:
                self.opt.step()
                self.opt.zero_grad()
                self.sched.step()
            total += loss.item()
            hits += (out.argmax(1) == y).float().mean().item()
        print(f"epoch {epoch} ce {total / batches:.4f} acc {hits / batches:.3f}")


tr = Trainer()
for e in range(10):
    tr.run_epoch(e)
