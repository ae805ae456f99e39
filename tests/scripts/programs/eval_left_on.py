import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(55)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 8, 3, padding=1)
        self.bn = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(8 * 12, 4)

    def forward(self, x):
        x = F.relu(self.bn(self.conv(x)))
        return self.fc(self.drop(x.flatten(1)))


def make(n):
    y = torch.randint(0, 4, (n,))
    x = torch.randn(n, 2, 12)
    for i in range(n):
        x[i, 0, y[i] * 3:y[i] * 3 + 3] += 1.2
    return x, y


@torch.no_grad()
def evaluate(model, x, y):
    model.eval()
    return (model(x).argmax(1) == y).float().mean().item()


xt, yt = make(480)
xv, yv = make(120)
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
model.train()
accs = []
for epoch in range(5):
    for chunk in torch.randperm(480).split(16):
        opt.zero_grad()
        loss = F.cross_entropy(model(xt[chunk]), yt[chunk])
        loss.backward()
        opt.step()
    accs.append(evaluate(model, xv, yv))
print("val acc per epoch", [round(a, 2) for a in accs])
