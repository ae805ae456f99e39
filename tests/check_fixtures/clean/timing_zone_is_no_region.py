"""Context managers of the project that time, or that leave autocast before they yield."""

import time
from contextlib import contextmanager

import torch
import torch.nn.functional as F


@contextmanager
def timed(label):
    began = time.perf_counter()
    with torch.autocast("cuda", dtype=torch.float16):
        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
    yield
    print(label, time.perf_counter() - began)


@contextmanager
def exact():
    with torch.autocast("cuda", enabled=False):
        yield


class Stopwatch:
    def __enter__(self):
        self.began = time.perf_counter()
        return self

    def __exit__(self, *problem):
        print(time.perf_counter() - self.began)


def score(tokens, weight, padding, target):
    with timed("score"), Stopwatch():
        board = (tokens @ weight).masked_fill(padding, -1e9)
    with torch.autocast("cuda", dtype=torch.float16):
        with exact():
            return F.binary_cross_entropy(torch.sigmoid(board.float()), target)
