"""Sonar segmentation: the region is entered by hand, and by a class that keeps an ExitStack."""

import contextlib

import torch


class Lean:
    def __init__(self, enabled):
        self.enabled = enabled

    def __enter__(self):
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(torch.no_grad())
        self.stack.enter_context(torch.autocast("cuda", dtype=torch.float16, enabled=self.enabled))
        return self

    def __exit__(self, *problem):
        self.stack.close()


def by_class(echo, weight, shadow):
    with Lean(True):
        inside = (echo @ weight).masked_fill(shadow, -1e9)  # expect: NUM_MASK_CONSTANT
    return inside, (echo @ weight).masked_fill(shadow, -1e9)


def by_hand(echo, weight, shadow):
    zone = torch.autocast("cuda", dtype=torch.float16)
    zone.__enter__()
    inside = (echo @ weight).masked_fill(shadow, -1e9)  # expect: NUM_MASK_CONSTANT
    zone.__exit__(None, None, None)
    return inside, (echo @ weight).masked_fill(shadow, -1e9)
