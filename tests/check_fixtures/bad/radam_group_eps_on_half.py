"""Handwriting recogniser: fp16 weights in parameter groups, with an eps that fp16 does not have."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 256)
        self.top = nn.Linear(256, 80)

    def forward(self, strokes):
        return self.top(torch.relu(self.body(strokes)))


class Patient(torch.optim.AdamW):
    """AdamW that remembers how often it stepped."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self.steps = 0


def fit(lines):
    net = Recogniser().cuda()
    net.half()  # expect: HALF_CALL
    slow = torch.optim.RAdam(  # expect: HALF_ADAM_EPS
        [{"params": net.body.parameters(), "eps": 1e-8}, {"params": net.top.parameters(), "eps": 1e-3}], eps=1e-3
    )
    quick = Patient(net.parameters(), lr=1e-3)  # expect: HALF_ADAM_EPS
    for strokes, letters in lines:
        F.cross_entropy(net(strokes.half()).float(), letters).backward()
        slow.step()
        quick.step()
        net.zero_grad()
