import math

import torch
import torch.nn.functional as F


def fit(net, loader, lr=1e-3):
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cuda")
    best = math.inf
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.mse_loss(net(x.cuda()), y.cuda())
        scaler.scale(loss).backward()
        scaler.step(opt)
        value = loss.item()
        if value < best:
            best = value
            scaler.update()  # expect: SCALER_UPDATE_MISPLACED
    return best
