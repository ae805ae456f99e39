"""Saliency network: the region is a context manager of the project's own."""

from contextlib import contextmanager

import torch
import torch.nn.functional as F


@contextmanager
def reduced():
    with torch.autocast("cuda", dtype=torch.float16):
        yield


def fit(saliency, pictures, optimizer):
    keeper = torch.amp.GradScaler("cuda")
    for picture, fixation in pictures:
        optimizer.zero_grad(set_to_none=True)
        with reduced():
            probability = torch.sigmoid(saliency(picture))
            cost = F.binary_cross_entropy(probability, fixation)  # expect: REGION_BCE
        keeper.scale(cost).backward()
        keeper.step(optimizer)
        keeper.update()
