"""The base unscales before the hook, or the override does."""

import torch
from torch.nn.utils import clip_grad_norm_


class Course:
    def __init__(self, net, descent):
        self.net = net
        self.descent = descent
        self.gs = torch.amp.GradScaler("cuda")

    def clip(self):
        pass

    def fit(self, batches):
        for batch in batches:
            self.descent.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                cost = self.net(batch)
            self.gs.scale(cost).backward()
            self.gs.unscale_(self.descent)
            self.clip()
            self.gs.step(self.descent)
            self.gs.update()


class Weather(Course):
    def clip(self):
        clip_grad_norm_(self.net.parameters(), 1.0)


def main(net, descent, batches):
    Weather(net, descent).fit(batches)
