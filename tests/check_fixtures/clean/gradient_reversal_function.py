"""Domain adaptation. The reversal is elementwise with one input, so autocast needs no decorator."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.weight * grad, None


class DANN(nn.Module):
    def __init__(self, dim=256, classes=10):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(784, dim), nn.ReLU())
        self.label = nn.Linear(dim, classes)
        self.domain = nn.Linear(dim, 2)

    def forward(self, x, weight):
        h = self.features(x)
        return self.label(h), self.domain(Reverse.apply(h, weight))


def train(loader, weight=0.1):
    net = DANN().cuda()
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    for x, y, d in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            cls, dom = net(x.cuda(), weight)
            loss = F.cross_entropy(cls, y.cuda()) + F.cross_entropy(dom, d.cuda())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
