import torch
import torch.nn as nn

torch.manual_seed(9)
DTYPE = torch.bfloat16
LR = 5e-4


class NTKLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(o, i))
        self.bias = nn.Parameter(torch.zeros(o))
        self.scale = i ** -0.5

    def forward(self, x):
        return (x @ self.weight.t()) * self.scale + self.bias


class Net(nn.Module):
    def __init__(self, d=16, h=64):
        super().__init__()
        self.a, self.b, self.c = NTKLinear(d, h), NTKLinear(h, h), NTKLinear(h, 1)

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x))))).squeeze(-1)


w = torch.randn(16)
net = Net().to(DTYPE)
opt = torch.optim.Adam(net.parameters(), lr=LR)
hist = []
for step in range(300):
    x = torch.randn(32, 16)
    y = torch.sin(x @ w / 4) * 2
    loss = (net(x.to(DTYPE)).float() - y).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    hist.append(loss.item())
    if (step + 1) % 30 == 0:
        print(f"step {step + 1} loss {sum(hist[-30:]) / 30:.4f}")
