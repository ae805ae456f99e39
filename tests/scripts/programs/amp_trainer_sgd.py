import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.enc = nn.Linear(d, 40)
        self.mid = nn.Linear(40, 40)
        self.head = nn.Linear(40, 1)

    def forward(self, x):
        return self.head(F.gelu(self.mid(F.gelu(self.enc(x))))).squeeze(-1)


class AmpTrainer:
    def __init__(self, model, lr, steps):
        self.model, self.steps = model, steps
        self.opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def forward_loss(self, x, y):
        with torch.autocast("cpu", dtype=torch.float16):
            pred = self.model(x)
        return F.mse_loss(pred.float(), y)

    def train(self, draw):
        for s in range(self.steps):
            x, y = draw()
            loss = self.forward_loss(x, y)
            self.opt.zero_grad()
            self.scaler.scale(loss).backward()
            self.opt.step()
            if s % 10 == 0 or s == self.steps - 1:
                print(f"step {s} loss {loss.item():.4f}")


def draw():
    x = torch.randn(16, 12)
    return x, x[:, 0] - 0.5 * x[:, 1] + torch.sin(x[:, 2])


if __name__ == "__main__":
    torch.manual_seed(14)
    AmpTrainer(Net(), lr=0.01, steps=100).train(draw)
