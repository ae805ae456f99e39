import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def count_parameters(module):
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


torch.manual_seed(4)
x = torch.randn(2000, 10)
y = 5 * torch.sin(x[:, 0]) + 3 * x[:, 1] * x[:, 2]
loader = DataLoader(TensorDataset(x, y), 50, shuffle=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.out = nn.Linear(64, 1)

    def forward(self, v):
        return self.out(self.body(v)).squeeze(-1)


model = Net()
print("parameters", count_parameters(model))
opt = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.98)
step = 0
for epoch in range(6):
    for xb, yb in loader:
        loss = F.mse_loss(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        sched.step()
        if step < 12 or step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        step += 1
