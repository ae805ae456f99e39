"""The scaler is the switch, but the plain step runs on the scaled arm; and the clip has no unscale_ there."""

import torch
from torch.nn.utils import clip_grad_norm_


def learn(net, rows, opt, gs=None):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = net(rows).mean()
    (gs.scale(loss) if gs else loss).backward()
    if gs:
        opt.step()  # expect: SCALER_STEP_BYPASSED
        gs.update()
    else:
        opt.step()
    opt.zero_grad()


def learn_clipped(net, rows, opt, gs: torch.amp.GradScaler | None):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = net(rows).mean()
    (loss if gs is None else gs.scale(loss)).backward()
    clip_grad_norm_(net.parameters(), 1.0)  # expect: SCALER_CLIP_BEFORE_UNSCALE
    if gs is None:
        opt.step()
    else:
        gs.step(opt)
        gs.update()
    opt.zero_grad()
