import torch
from torch import nn


class Regressor(nn.Module):
    def __init__(self, features=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def train(loader, epochs=5):
    model = Regressor().cuda().half()  # expect: HALF_CALL
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)  # expect: HALF_ADAM_EPS
    for _ in range(epochs):
        for x, y in loader:
            pred = model(x.cuda().to(torch.float16))
            loss = nn.functional.mse_loss(pred.float(), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model
