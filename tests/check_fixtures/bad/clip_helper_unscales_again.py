import torch
from torch import nn


def clip_(scaler, optimizer, params, max_norm):
    scaler.unscale_(optimizer)  # expect: SCALER_UNSCALE_TWICE
    return nn.utils.clip_grad_norm_(params, max_norm)


def has_finite_grads(params):
    return all(torch.isfinite(p.grad).all() for p in params if p.grad is not None)


def train(model, loader, epochs=4):
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.RMSprop(params, lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    skipped = 0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.huber_loss(model(x.cuda()), y.cuda())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if not has_finite_grads(params):
                skipped += 1
            clip_(scaler, optimizer, params, 0.5)
            scaler.step(optimizer)
            scaler.update()
    return skipped
