import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.backbone(x))


def loop(model, opt, steps, W):
    for _ in range(steps):
        x = torch.randn(32, 10)
        y = (x @ W).argmax(1)
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


if __name__ == "__main__":
    torch.manual_seed(33)
    model, W = Net(), torch.randn(10, 4)
    # stage 1: head only
    model.backbone.requires_grad_(False)
    stage1 = torch.optim.Adam(model.head.parameters(), lr=5e-3)
    l1 = loop(model, stage1, 80, W)
    # stage 2: everything, smaller learning rate, fresh optimizer
    model.backbone.requires_grad_(True)
    stage2 = torch.optim.Adam(model.parameters(), lr=1e-3)
    l2 = loop(model, stage2, 120, W)
    print("stage1", l1, "stage2", l2)
