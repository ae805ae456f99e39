import torch
from torch import nn
from torch.utils.data import TensorDataset, DataLoader

torch.manual_seed(11)
inputs = torch.randn(640, 9)
targets = (inputs.pow(2).sum(1) > 8.5).float()
dataset = TensorDataset(inputs, targets)
loader = DataLoader(dataset, batch_size=20, shuffle=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(9, 28)
        self.l2 = nn.Linear(28, 14)
        self.l3 = nn.Linear(14, 1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = self.drop(torch.relu(self.l1(x)))
        x = torch.relu(self.l2(x))
        return self.l3(x).squeeze(1)


net = Net()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
crit = nn.BCEWithLogitsLoss()
num_iterations = 160
for it in range(num_iterations):
    x, t = next(iter(loader))
    opt.zero_grad()
    out = net(x)
    loss = crit(out, t)
    loss.backward()
    opt.step()
print("finished", it + 1, "iterations, loss", round(loss.item(), 4))
