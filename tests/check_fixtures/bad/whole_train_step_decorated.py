import torch
from torch import nn


class Trainer:
    def __init__(self, model):
        self.model = model
        self.opt = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.autocast("cuda", dtype=torch.bfloat16)
    def train_step(self, x, y):
        out = self.model(x)
        loss = nn.functional.cross_entropy(out, y)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()  # expect: REGION_BACKWARD_INSIDE
        self.opt.step()  # expect: REGION_BACKWARD_INSIDE
        return loss.detach()

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            losses = [self.train_step(x.cuda(), y.cuda()) for x, y in loader]
            print(epoch, torch.stack(losses).mean().item())
