import torch
import torch.nn as nn
import torch.nn.functional as F


class Stack(nn.Module):
    def __init__(self, d=16, h=40, depth=4, classes=4):
        super().__init__()
        self.stem = nn.Linear(d, h)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(h), nn.Linear(h, h), nn.ReLU()) for _ in range(depth))
        self.head = nn.Linear(h, classes)

    def forward(self, x):
        x = F.relu(self.stem(x))
        for l in self.layers:
            x = x + l(x)
        return self.head(x)


class UnfreezeSchedule:
    def __init__(self, model, every):
        self.order = [model.stem, *model.layers]
        self.every = every
        for m in self.order:
            m.requires_grad_(False)

    def maybe(self, step):
        if step and step % self.every == 0 and self.order:
            m = self.order.pop()
            m.requires_grad_(True)
            print(f"step {step}: unfroze one more block, {len(self.order)} left")


def main():
    torch.manual_seed(9)
    W = torch.randn(16, 4)
    model = Stack()
    sched = UnfreezeSchedule(model, 40)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(240):
        sched.maybe(step)
        x = torch.randn(48, 16)
        y = (x @ W + (x[:, :4] ** 2)).argmax(1)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
