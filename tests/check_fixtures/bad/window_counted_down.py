"""A counter that is set back ends the window; the scale is updated in between."""

import torch


def fit(picker, traces, descent, k):
    gs = torch.amp.GradScaler("cuda")
    micro = 0
    for trace, onset in traces:
        with torch.autocast("cuda", dtype=torch.float16):
            cost = picker(trace, onset) / k
        gs.scale(cost).backward()
        micro += 1
        if micro == k:
            gs.step(descent)
            descent.zero_grad()
            micro = 0
        gs.update()  # expect: SCALER_IN_ACCUMULATION


def fit_pending(picker, traces, descent, k):
    gs = torch.amp.GradScaler("cuda")
    pending = k
    for trace, onset in traces:
        with torch.autocast("cuda", dtype=torch.float16):
            cost = picker(trace, onset) / k
        gs.scale(cost).backward()
        pending -= 1
        gs.step(descent)  # expect: SCALER_IN_ACCUMULATION
        gs.update()
        if not pending:
            descent.zero_grad()
            pending = k
