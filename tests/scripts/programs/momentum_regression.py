import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def count_parameters(module):
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


LR = 0.9
torch.manual_seed(20)
x = torch.randn(1200, 20)
y = (x[:, :5] ** 2).sum(1, keepdim=True) + x[:, 5:6] * 3
loader = DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f1 = nn.Linear(20, 48)
        self.f2 = nn.Linear(48, 48)
        self.f3 = nn.Linear(48, 1)

    def forward(self, v):
        return self.f3(torch.relu(self.f2(torch.relu(self.f1(v)))))


model = Net()
print("parameters", count_parameters(model))
opt = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
crit = nn.MSELoss()
step = 0
for epoch in range(3):
    for xb, yb in loader:
        loss = crit(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 0:
            print(f"epoch {epoch} step {step} mse {loss.item():.5g}")
        step += 1
    sched.step()
