import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

torch.manual_seed(20)
EPOCHS, ITERS = 10, 15  # the rate reaches exactly 0 at the very last iteration

x = torch.randn(ITERS * 16, 7)
y = torch.cos(x[:, :1]) + 0.2 * x[:, 1:2]
model = nn.Sequential(nn.Linear(7, 24), nn.SiLU(), nn.Linear(24, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS * ITERS - 1, eta_min=0.0)
lrs = []

for epoch in range(EPOCHS):
    order = torch.randperm(len(x))
    for i in range(ITERS):
        idx = order[i * 16:(i + 1) * 16]
        loss = nn.functional.mse_loss(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lrs.append(optimizer.param_groups[0]["lr"])
        scheduler.step()

print("loss", loss.item(), "first/last lr", lrs[0], lrs[-1])
