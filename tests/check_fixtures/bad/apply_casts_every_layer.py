"""Ocean model emulator: the weights are halved by a function given to apply()."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def shrink(layer):
    if isinstance(layer, (nn.Linear, nn.Conv2d)):
        layer.half()  # expect: HALF_CALL


def fit(fields):
    emulator = nn.Sequential(nn.Conv2d(4, 32, 3), nn.GELU(), nn.Conv2d(32, 4, 3)).cuda()
    emulator.apply(shrink)
    descent = torch.optim.SGD(emulator.parameters(), lr=0.01)
    for now, later in fields:
        descent.zero_grad()
        F.l1_loss(emulator(now.half()).float(), later).backward()
        descent.step()
