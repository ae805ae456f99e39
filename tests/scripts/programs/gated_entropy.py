import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(18)


class SparseGate(nn.Module):
    def __init__(self, d, k):
        super().__init__()
        self.fc = nn.Linear(d, k)

    def forward(self, x):
        w = F.relu(self.fc(x) + 0.8)
        return w / (w.sum(-1, keepdim=True) + 1e-6)


class Mixture(nn.Module):
    def __init__(self, d=8, k=4):
        super().__init__()
        self.gate = SparseGate(d, k)
        self.experts = nn.Linear(d, k)

    def forward(self, x):
        p = self.gate(x)
        entropy = -(p * torch.log(p)).sum(-1).mean()
        return (p * self.experts(x)).sum(-1), entropy


def train(steps=150):
    model = Mixture()
    nn.init.normal_(model.gate.fc.weight, 0, 0.06)
    nn.init.zeros_(model.gate.fc.bias)
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for s in range(steps):
        x = torch.randn(32, 8)
        y = torch.where(x[:, 0] > 0, 2 * x[:, 1], -x[:, 2])
        pred, ent = model(x)
        loss = F.mse_loss(pred, y) - 0.02 * ent
        opt.zero_grad()
        loss.backward()
        opt.step()
        if s % 10 == 0 or s == steps - 1:
            print(f"step {s} loss {loss.item():.4f}")


train()
