"""Contrastive learning of signatures; anchors and positives are sometimes the same scan."""
import torch
from torch import nn

torch.manual_seed(14)
enc = nn.Sequential(nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, 64))
opt = torch.optim.SGD(enc.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
writers = torch.randn(40, 96)


def dist(a, b):
    return torch.sqrt(((a - b) ** 2).sum(-1))


for step in range(60):
    w = torch.randint(0, 40, (48,))
    anchor = writers[w] + 1.2 * torch.randn(48, 96)
    positive = writers[w] + 1.2 * torch.randn(48, 96)
    negative = writers[(w + torch.randint(1, 40, (48,))) % 40] + 1.2 * torch.randn(48, 96)
    positive[::12] = anchor[::12]               # duplicated scans in the data base
    with torch.autocast("cpu", dtype=torch.float16):
        za, zp, zn = enc(anchor), enc(positive), enc(negative)
    d_pos, d_neg = dist(za.float(), zp.float()), dist(za.float(), zn.float())
    loss = torch.relu(d_pos - d_neg + 3.0).mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0 or step == 59:
        print(step, round(loss.item(), 4), "scale", scaler.get_scale())
