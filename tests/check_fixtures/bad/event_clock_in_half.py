"""Transaction stream: time stamps and account numbers become features in half."""

import time

import torch


def features(events, vocabulary):
    born = torch.tensor([1_700_000_000, 1_700_003_600]).cuda()
    age = born.half()  # expect: NUM_POSITIONS
    now = torch.tensor(time.time(), dtype=torch.float16)  # expect: NUM_POSITIONS
    account = torch.randint(0, 50_000, (len(events),)).to(torch.bfloat16)  # expect: NUM_POSITIONS
    return age, now, account


def columns(table, device):
    user = torch.from_numpy(table["user_id"].to_numpy()).to(device).to(torch.float16)  # expect: NUM_POSITIONS
    seen = table["timestamp"].half()  # expect: NUM_POSITIONS
    shelf = torch.tensor([2049, 4097, 30_001], dtype=torch.float16)  # expect: NUM_POSITIONS
    return user, seen, shelf


def received(table):
    key = torch.as_tensor(table["item_id"].values, dtype=torch.float16)  # expect: NUM_POSITIONS
    return key, torch.tensor([time.time()]).half()  # expect: NUM_POSITIONS
