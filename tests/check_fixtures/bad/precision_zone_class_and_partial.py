"""Region by a class with __enter__, by functools.partial and by a lambda."""

import functools

import torch
import torch.nn as nn

lean = functools.partial(torch.autocast, device_type="cuda", dtype=torch.float16)
sparing = lambda: torch.autocast("cuda", dtype=torch.float16)  # noqa: E731


class Reduced:
    def __init__(self, enabled=True):
        self.inner = torch.autocast("cuda", dtype=torch.float16, enabled=enabled)

    def __enter__(self):
        self.inner.__enter__()
        return self

    def __exit__(self, *problem):
        return self.inner.__exit__(*problem)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query = nn.Linear(width, width)

    def forward(self, tokens, padding):
        query = self.query(tokens)
        score = query @ query.transpose(-1, -2)
        with Reduced():
            third = self.query(tokens).masked_fill(padding, -1e9)  # expect: NUM_MASK_CONSTANT
        return score, third


class Thrifty(torch.autocast):
    def __init__(self):
        super().__init__("cuda", dtype=torch.float16)


def attend(tokens, padding, weight):
    with Thrifty():
        zeroth = (tokens @ weight).masked_fill(padding, -1e9)  # expect: NUM_MASK_CONSTANT
    with lean():
        first = (tokens @ weight).masked_fill(padding, -1e9)  # expect: NUM_MASK_CONSTANT
    with sparing():
        second = (tokens @ weight).masked_fill(padding, -1e9)  # expect: NUM_MASK_CONSTANT
    return zeroth, first, second
