import logging

import torch
import torch.nn as nn

log = logging.getLogger(__name__)


def global_norm(module: nn.Module) -> float:
    total = 0.0
    for p in module.parameters():
        if p.grad is not None:
            total += p.grad.detach().float().pow(2).sum().item()  # expect: SCALER_GRADS_STILL_SCALED
    return total**0.5


def train(model, loader, optimizer, epochs):
    scaler = torch.amp.GradScaler("cuda")
    loss_fn = nn.SmoothL1Loss()
    for epoch in range(epochs):
        for step, (x, y) in enumerate(loader):
            x, y = x.cuda(), y.cuda()
            with torch.autocast("cuda"):
                loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if step % 50 == 0:
                log.info("epoch %d step %d grad norm %.3f", epoch, step, global_norm(model))
            scaler.step(optimizer)
            scaler.update()
