import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def count_parameters(module):
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


torch.manual_seed(18)
x = torch.randn(1600, 16)
w = torch.randn(16)
keep = (x @ w).abs() > 0.1
x, y = x[keep], torch.sign(x[keep] @ w)
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)


class Margin(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 24)
        self.fc2 = nn.Linear(24, 1)

    def forward(self, v):
        return self.fc2(torch.relu(self.fc1(v))).squeeze(1)


model = Margin()
print("parameters", count_parameters(model))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
step, zero = 0, 0
for epoch in range(3):
    for xb, yb in loader:
        loss = torch.relu(1 - yb * model(xb)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        zero += loss.item() == 0.0
        step += 1
        if step % 25 == 0:
            print(f"epoch {epoch} step {step} hinge {loss.item():.5f} zero-loss batches {zero}")
with torch.no_grad():
    print("train accuracy", (torch.sign(model(x)) == y).float().mean().item())
