"""Whether there is a scaler decides: scaled and plain path share one backward."""

import torch
from torch.nn.utils import clip_grad_norm_


def learn(net, rows, opt, gs=None):
    with torch.autocast("cuda", dtype=torch.float16 if gs else torch.bfloat16):
        loss = net(rows).mean()
    (gs.scale(loss) if gs else loss).backward()
    if gs:
        gs.step(opt)
        gs.update()
    else:
        opt.step()
    opt.zero_grad()


def learn_clipped(net, rows, opt, gs: torch.amp.GradScaler | None):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = net(rows).mean()
    loss = loss if gs is None else gs.scale(loss)
    loss.backward()
    if gs is not None:
        gs.unscale_(opt)
    clip_grad_norm_(net.parameters(), 1.0)
    if gs is None:
        opt.step()
    else:
        gs.step(opt)
        gs.update()
    opt.zero_grad()


class Learner:
    def __init__(self, net, opt, fast):
        self.net, self.opt = net, opt
        self.keeper = torch.amp.GradScaler("cuda") if fast else None

    def learn(self, rows):
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.keeper is not None):
            loss = self.net(rows).mean()
        if self.keeper:
            self.keeper.scale(loss).backward()
        else:
            loss.backward()
        if self.keeper:
            self.keeper.step(self.opt)
            self.keeper.update()
        else:
            self.opt.step()
        self.opt.zero_grad()
