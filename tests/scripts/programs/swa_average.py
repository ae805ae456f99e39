import torch
import torch.nn as nn
from torch.optim.swa_utils import AveragedModel, SWALR, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(27)
X = torch.randn(320, 8)
y = (X[:, 0] > X[:, 1] * X[:, 2]).long()
loader = DataLoader(TensorDataset(X, y), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 2))
swa_model = AveragedModel(model)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
swa_sched = SWALR(opt, swa_lr=0.02, anneal_epochs=2)
crit = nn.CrossEntropyLoss()
SWA_START = 5
for epoch in range(10):
    for xb, yb in loader:
        opt.zero_grad()
        loss = crit(model(xb), yb)
        loss.backward()
        opt.step()
    if epoch >= SWA_START:
        swa_model.update_parameters(model)
        swa_sched.step()
update_bn(loader, swa_model)
swa_model.eval()
with torch.no_grad():
    print("swa acc", (swa_model(X).argmax(1) == y).float().mean().item())
