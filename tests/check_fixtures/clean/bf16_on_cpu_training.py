import torch
import torch.nn.functional as F


class MLP(torch.nn.Module):
    def __init__(self, cin=32, hidden=128, classes=5):
        super().__init__()
        self.inp = torch.nn.Linear(cin, hidden)
        self.norm = torch.nn.BatchNorm1d(hidden)
        self.out = torch.nn.Linear(hidden, classes)

    def forward(self, x):
        return self.out(F.relu(self.norm(self.inp(x))))


def train(x, y, epochs=20, batch=64):
    model = MLP(x.size(1), classes=int(y.max()) + 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for idx in torch.randperm(len(x)).split(batch):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
    return model
