"""binary_cross_entropy raises under CUDA autocast only; the CPU runs it in fp32."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Clicker(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return torch.sigmoid(self.net(x).float()).squeeze(-1)


def train(x, y, epochs=10):
    net = Clicker(x.size(1))
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(epochs):
        for idx in torch.randperm(len(x)).split(128):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.binary_cross_entropy(net(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
    return net
