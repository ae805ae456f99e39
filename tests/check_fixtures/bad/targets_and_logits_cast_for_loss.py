import torch
from torch import nn


class DepthTrainer:
    def __init__(self, net):
        self.net = net.cuda()
        self.opt = torch.optim.AdamW(net.parameters(), lr=2e-4)
        self.scaler = torch.amp.GradScaler("cuda")
        self.l2 = nn.MSELoss()

    def step(self, rgb, depth):
        self.opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            pred = self.net(rgb.cuda())
            loss = self.l2(pred, depth.cuda().half())  # expect: HALF_LOSS_INPUT
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()


def main(net, loader):
    trainer = DepthTrainer(net)
    for rgb, depth in loader:
        trainer.step(rgb, depth)
