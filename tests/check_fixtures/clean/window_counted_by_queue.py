"""The same windows with everything inside the guard; a log queue beside the step is no window."""

import itertools

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
        if len(queue) == k:
            gs.unscale_(descent)
            clip_grad_norm_(picker.parameters(), 1.0)
            gs.step(descent)
            gs.update()
            descent.zero_grad()
            queue.clear()


def fit_batched(picker, traces, descent, k):
    gs = torch.amp.GradScaler("cuda")
    for window in itertools.batched(traces, k):
        for trace, onset in window:
            with torch.autocast("cuda", dtype=torch.float16):
                cost = picker(trace, onset) / k
            gs.scale(cost).backward()
        gs.unscale_(descent)
        clip_grad_norm_(picker.parameters(), 1.0)
        gs.step(descent)
        gs.update()
        descent.zero_grad()


def fit_logged(picker, traces, descent):
    gs = torch.amp.GradScaler("cuda")
    losses = []
    for trace, onset in traces:
        descent.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            cost = picker(trace, onset)
        gs.scale(cost).backward()
        gs.step(descent)
        gs.update()
        losses.append(cost.item())
        if len(losses) == 100:
            print(sum(losses))
            losses.clear()
