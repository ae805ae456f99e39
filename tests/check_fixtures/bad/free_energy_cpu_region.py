import torch
import torch.nn as nn


class RBMHead(nn.Module):
    def __init__(self, visible=784, hidden=128):
        super().__init__()
        self.lin = nn.Linear(visible, hidden)
        self.mix = nn.Linear(hidden, 10)

    def forward(self, v):
        comp = self.mix(torch.relu(self.lin(v)))
        total = comp.exp().sum(1)
        return total.log()  # expect: NUM_LOGSUMEXP


def train(loader, epochs=3):
    model = RBMHead()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for v, target in loader:
            with torch.autocast("cpu", dtype=torch.float16):
                free = model(v.flatten(1))
                loss = nn.functional.mse_loss(free, target)
            opt.zero_grad()
            loss.backward()  # expect: SCALER_MISSING
            opt.step()
