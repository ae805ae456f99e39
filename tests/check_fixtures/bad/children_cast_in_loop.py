"""Crop yield regression: every child is cast in a loop, then trained."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def fit(seasons):
    regressor = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    for child in regressor.children():
        child.to(torch.bfloat16)  # expect: HALF_CALL
    descent = torch.optim.SGD(regressor.parameters(), lr=0.01)
    for soil, amount in seasons:
        descent.zero_grad()
        F.mse_loss(regressor(soil.bfloat16()).float(), amount).backward()
        descent.step()
