import contextlib

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train(model, loader, rank, accumulate=4):
    ddp = DDP(model.to(rank), device_ids=[rank])
    opt = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % accumulate == 0
        with contextlib.nullcontext() if last else ddp.no_sync():
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(ddp(x.to(rank)), y.to(rank)) / accumulate
            scaler.scale(loss).backward()
        if last:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
