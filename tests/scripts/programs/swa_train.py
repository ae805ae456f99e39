import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, SWALR, update_bn
from torch.utils.data import DataLoader, TensorDataset


def count_parameters(module):
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


torch.manual_seed(22)
x = torch.randn(640, 20)
y = (x[:, :3].sum(1) + 0.7 * x[:, 3] * x[:, 4] > 0).long()
loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
tx = torch.randn(500, 20)
ty = (tx[:, :3].sum(1) + 0.7 * tx[:, 3] * tx[:, 4] > 0).long()

model = nn.Sequential(nn.Linear(20, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 2))
print("parameters", count_parameters(model))
swa = AveragedModel(model)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
main_sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 6)
swa_sched = SWALR(opt, swa_lr=0.02, anneal_epochs=2)
for epoch in range(10):
    model.train()
    total = 0.0
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    if epoch >= 6:
        swa.update_parameters(model)
        swa_sched.step()
    else:
        main_sched.step()
    print(f"epoch {epoch} loss {total / len(loader):.4f} lr {opt.param_groups[0]['lr']:.4f}")
update_bn(loader, swa)
for name, m in (("last", model), ("swa", swa)):
    m.eval()
    with torch.no_grad():
        print(name, (m(tx).argmax(1) == ty).float().mean().item())
