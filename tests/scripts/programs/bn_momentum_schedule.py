import torch
import torch.nn as nn

torch.manual_seed(22)
model = nn.Sequential(
    nn.Linear(9, 20), nn.BatchNorm1d(20, momentum=0.5), nn.ReLU(),
    nn.Linear(20, 20), nn.BatchNorm1d(20, momentum=0.5), nn.ReLU(),
    nn.Linear(20, 2))


class BNMomentumScheduler:
    def __init__(self, model, fn):
        self.model, self.fn, self.e = model, fn, 0

    def step(self):
        self.e += 1
        for m in self.model.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.momentum = self.fn(self.e)


opt = torch.optim.Adam(model.parameters(), lr=2e-3)
bns = BNMomentumScheduler(model, lambda e: max(0.5 * 0.5 ** e, 0.001))
X = torch.randn(400, 9)
Y = (X[:, :4].prod(1) > 0).long()
for epoch in range(8):
    for idx in torch.randperm(400).split(20):
        loss = nn.functional.cross_entropy(model(X[idx]), Y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    bns.step()
print("loss", loss.item())
