import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(11)
DTYPE = torch.bfloat16


class BalancedLoss(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.register_buffer("seen", torch.ones(classes))

    def forward(self, logits, y):
        for k in y.tolist():
            self.seen[k] += 1
        freq = self.seen.float() / self.seen.float().sum()
        w = 1.0 / freq
        w = w / w.mean()
        return F.cross_entropy(logits.float(), y, weight=w)


class Model(nn.Module):
    def __init__(self, d=10, classes=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, classes))
        self.criterion = BalancedLoss(classes)

    def forward(self, x, y):
        logits = self.body(x)
        return logits, self.criterion(logits, y)


prior = torch.tensor([0.72, 0.16, 0.08, 0.04])
centers = torch.randn(4, 10) * 0.45


def batch(n=64):
    y = torch.multinomial(prior, n, replacement=True)
    return (centers[y] + torch.randn(n, 10)).to(DTYPE), y


model = Model().to(DTYPE)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(300):
    x, y = batch()
    logits, loss = model(x, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if (step + 1) % 50 == 0:
        print(f"step {step + 1} loss {loss.item():.4f} seen {[int(v) for v in model.criterion.seen]}")
x, y = batch(2000)
pred = model.body(x).argmax(1)
print("recall per class", [round((pred[y == k] == k).float().mean().item(), 3) for k in range(4)])
