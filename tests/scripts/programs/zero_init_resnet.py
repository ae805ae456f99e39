import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(27)


class ZeroBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d, d), nn.Linear(d, d)
        self.gate = nn.Parameter(torch.zeros(1))
        nn.init.zeros_(self.fc2.bias)

    def forward(self, x):
        return x + self.gate * self.fc2(F.relu(self.fc1(x)))


class ReZero(nn.Module):
    def __init__(self, d=32, depth=6):
        super().__init__()
        self.inp = nn.Linear(4, d)
        self.blocks = nn.Sequential(*[ZeroBlock(d) for _ in range(depth)])
        self.out = nn.Linear(d, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x):
        return self.out(self.blocks(self.inp(x))).squeeze(-1)


model = ReZero()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
hist = []
for step in range(1, 201):
    x = torch.randn(64, 4)
    y = torch.sin(x[:, 0]) * x[:, 1] + x[:, 2].abs()
    loss = F.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    hist.append(loss.item())
    if step % 25 == 0:
        gates = [round(b.gate.item(), 3) for b in model.blocks]
        print(f"step {step} loss {sum(hist[-25:]) / 25:.4f} gates {gates[:3]}")
