import torch
import torch.nn.functional as F
from torch import nn


class Matcher(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, 128), nn.ReLU(), nn.Linear(128, dim))

    def forward(self, a, b):
        za, zb = self.enc(a).float(), self.enc(b).float()
        return 0.5 * (1 + F.cosine_similarity(za, zb, dim=-1))


def train(loader):
    net = Matcher().cuda()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for a, b, same in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            prob = net(a.cuda(), b.cuda())
        loss = F.binary_cross_entropy(prob.float().clamp(1e-5, 1 - 1e-5), same.cuda().float())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
