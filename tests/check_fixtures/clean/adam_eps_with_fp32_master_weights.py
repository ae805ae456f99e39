"""Half working copy, fp32 masters own the optimizer state."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

SCALE = 1024.0


class MasterWeights:
    def __init__(self, model):
        self.model = model.half()
        self.masters = [p.detach().clone().float().requires_grad_(True) for p in model.parameters()]

    def pull_grads(self):
        for m, p in zip(self.masters, self.model.parameters()):
            m.grad = p.grad.float() / SCALE

    @torch.no_grad()
    def push_weights(self):
        for m, p in zip(self.masters, self.model.parameters()):
            p.copy_(m)


def train(loader):
    net = MasterWeights(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).cuda())
    opt = torch.optim.Adam(net.masters, lr=1e-3, eps=1e-8)
    for x, y in loader:
        logits = net.model(x.cuda().half())
        loss = F.cross_entropy(logits.float(), y.cuda())
        net.model.zero_grad()
        (loss * SCALE).backward()
        net.pull_grads()
        if all(torch.isfinite(m.grad).all() for m in net.masters):
            opt.step()
            net.push_weights()
    return copy.deepcopy(net.model)
