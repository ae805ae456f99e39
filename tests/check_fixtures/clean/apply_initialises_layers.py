"""apply() with an initialiser, and with a cast on a frozen teacher only."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def start(layer):
    if isinstance(layer, nn.Linear):
        nn.init.orthogonal_(layer.weight)


def shrink(layer):
    if isinstance(layer, nn.Linear):
        layer.half()


def fit(seasons, teacher):
    regressor = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    regressor.apply(start)
    teacher.eval().requires_grad_(False)
    teacher.apply(shrink)
    for child in teacher.children():
        child.half()
    descent = torch.optim.SGD(regressor.parameters(), lr=0.01)
    for soil in seasons:
        with torch.no_grad():
            wanted = teacher(soil.half()).float()
        descent.zero_grad()
        F.mse_loss(regressor(soil), wanted).backward()
        descent.step()
