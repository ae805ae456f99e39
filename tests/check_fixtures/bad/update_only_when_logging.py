import time

import torch
import torch.nn.functional as F

LOG_EVERY = 25


def train(model, loader, optimizer, max_steps=10_000):
    scaler = torch.amp.GradScaler("cuda")
    t0 = time.time()
    step = 0
    while step < max_steps:
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(x.cuda()), y.cuda())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            if step % LOG_EVERY == 0:
                dt = time.time() - t0
                print(f"{step:6d} loss {loss.item():.4f} scale {scaler.get_scale():.0f} {dt:.1f}s")
                scaler.update()  # expect: SCALER_UPDATE_MISPLACED
            step += 1
            if step >= max_steps:
                break
