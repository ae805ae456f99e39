import torch
import torch.nn.functional as F
from torch import autograd


def train(model, loader, weight=0.1):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        x = x.cuda().requires_grad_(True)
        y = y.cuda()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            ce = F.cross_entropy(model(x), y)
        scaled = scaler.scale(ce)
        (gx,) = autograd.grad(scaled, (x,), create_graph=True)  # expect: SCALER_GRAD_PENALTY
        with torch.autocast("cuda", dtype=torch.float16):
            penalty = gx.float().pow(2).flatten(1).sum(1).mean()
            loss = ce + weight * penalty
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
