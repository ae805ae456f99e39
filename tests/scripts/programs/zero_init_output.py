import torch
import torch.nn as nn


class ResBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc1 = nn.Linear(d, d)
        self.fc2 = nn.Linear(d, d)
        nn.init.zeros_(self.fc2.weight)
        nn.init.zeros_(self.fc2.bias)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)))


class FixupNet(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.inp = nn.Linear(5, d)
        self.blocks = nn.Sequential(*[ResBlock(d) for _ in range(3)])
        self.out = nn.Linear(d, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x):
        return self.out(self.blocks(self.inp(x)))


torch.manual_seed(21)
net = FixupNet()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(150):
    x = torch.randn(32, 5)
    y = (x[:, 0] * x[:, 1] > 0).long()
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("loss", loss.item())
