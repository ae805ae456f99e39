"""A base class runs the loop; a subclass overrides the hook between backward and step."""

import torch
from torch.nn.utils import clip_grad_norm_


class Course:
    def __init__(self, net, descent):
        self.net = net
        self.descent = descent
        self.gs = torch.amp.GradScaler("cuda")

    def cost(self, batch):
        raise NotImplementedError

    def after_backward(self):
        pass

    def fit(self, batches):
        for batch in batches:
            self.descent.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                cost = self.cost(batch)
            self.gs.scale(cost).backward()
            self.after_backward()
            self.gs.step(self.descent)
            self.gs.update()


class Weather(Course):
    def cost(self, batch):
        return self.net(batch["now"]).sub(batch["later"]).abs().mean()

    def after_backward(self):
        clip_grad_norm_(self.net.parameters(), 1.0)  # expect: SCALER_CLIP_BEFORE_UNSCALE


class Tides(Course):
    def cost(self, batch):
        return self.net(batch["now"]).sub(batch["later"]).abs().mean()

    def after_backward(self):
        self.gs.unscale_(self.descent)
        clip_grad_norm_(self.net.parameters(), 1.0)
