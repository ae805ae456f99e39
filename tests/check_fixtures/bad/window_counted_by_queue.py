"""Seismic picker: the window ends when the queue is full, but unscale_ runs for every trace."""

import torch
from torch.nn.utils import clip_grad_norm_


def fit(picker, traces, descent, k=8):
    gs = torch.amp.GradScaler("cuda")
    queue = []
    for trace, onset in traces:
        with torch.autocast("cuda", dtype=torch.float16):
            cost = picker(trace, onset) / k
        gs.scale(cost).backward()
        queue.append(cost.detach())
        gs.unscale_(descent)  # expect: SCALER_IN_ACCUMULATION
        if len(queue) == k:
            clip_grad_norm_(picker.parameters(), 1.0)
            gs.step(descent)
            gs.update()
            descent.zero_grad()
            queue.clear()
