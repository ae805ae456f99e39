import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(16)


class BayesMLP(nn.Module):
    def __init__(self, p=0.1):
        super().__init__()
        self.f1, self.f2, self.f3 = nn.Linear(1, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        x = self.drop(torch.tanh(self.f1(x)))
        x = self.drop(torch.tanh(self.f2(x)))
        return self.f3(x)


def mc_predict(model, x, samples=20):
    was = model.training
    model.eval()
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.train()
    with torch.no_grad():
        draws = torch.stack([model(x) for _ in range(samples)])
    model.train(was)
    return draws.mean(0), draws.std(0)


x = torch.rand(512, 1) * 4 - 2
y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)
loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
model = BayesMLP()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
grid = torch.linspace(-4, 4, 33).unsqueeze(1)
for epoch in range(12):
    model.train()
    tot = 0.0
    for xb, yb in loader:
        loss = F.mse_loss(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        tot += loss.item()
    mean, std = mc_predict(model, grid)
    print(f"epoch {epoch} loss {tot / len(loader):.4f} std in {std[8:25].mean():.3f} out {std[[0, -1]].mean():.3f}")
