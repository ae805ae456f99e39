import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(8)
x = torch.randn(512, 10)
y = (x[:, 0] * x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 2))
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
crit = nn.CrossEntropyLoss()
ACC = 4

micro = 0
for epoch in range(3):
    opt.zero_grad()
    for xb, yb in loader:
        loss = crit(model(xb), yb) / ACC
        loss.backward()
        micro += 1
        if micro % ACC == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
model.eval()
with torch.no_grad():
    acc = (model(x).argmax(1) == y).float().mean()
print("micro steps", micro, "acc", acc.item())
