"""itertools.batched makes the windows; unscale_ sits in the inner loop."""

import itertools

import torch
from torch.nn.utils import clip_grad_norm_


def fit(picker, traces, descent, k):
    gs = torch.amp.GradScaler("cuda")
    for window in itertools.batched(traces, k):
        for trace, onset in window:
            with torch.autocast("cuda", dtype=torch.float16):
                cost = picker(trace, onset) / k
            gs.scale(cost).backward()
            gs.unscale_(descent)  # expect: SCALER_IN_ACCUMULATION
        clip_grad_norm_(picker.parameters(), 1.0)
        gs.step(descent)
        gs.update()
        descent.zero_grad()
