"""Differences are taken in integers or float64 and only the small result is halved."""

import time

import torch


def features(events):
    born = torch.tensor([1_700_000_000, 1_700_003_600]).cuda()
    age = ((born - born.min()).double() / 86_400.0).half()
    now = torch.tensor(time.time(), dtype=torch.float64)
    share = torch.tensor([12, 250, 7]).to(torch.bfloat16)
    phase = torch.sin(born.double() / 86_400.0).to(torch.float16)
    weight = torch.tensor([0.25, 0.75], dtype=torch.float16)
    return age, now, share, phase, weight


def columns(table, began):
    price = torch.from_numpy(table["price"].to_numpy()).to(torch.float16)
    elapsed = torch.tensor(time.time() - began, dtype=torch.float16)
    sizes = torch.tensor([64, 128, 4096], dtype=torch.float16)
    rate = torch.tensor(44_100, dtype=torch.bfloat16)
    return price, elapsed, sizes, rate


def shares(table):
    part = torch.tensor([100_000, 40_000]).div(100_000).half()
    hit = torch.tensor(table["labels"].values, dtype=torch.float16)
    return part, hit
