import torch
import torch.nn as nn
import torch.nn.functional as F


class ChannelGain(nn.Module):
    """Divides each channel by its mean magnitude."""

    def __init__(self, channels, eps=1e-8):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.eps = eps

    def forward(self, x):
        y = self.conv(x)
        level = y.abs().mean(dim=(2, 3), keepdim=True)
        return y / (level + self.eps)  # expect: NUM_EPS_UNDERFLOW


def train(loader):
    net = nn.Sequential(ChannelGain(3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10)).cuda()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(net(x.cuda()), y.cuda())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
