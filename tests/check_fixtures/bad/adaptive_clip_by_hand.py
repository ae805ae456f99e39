"""Adaptive gradient clipping (unit-wise) written by hand, used with a loss scaler."""
import torch


def unit_norm(x):
    if x.ndim <= 1:
        return x.norm()
    return x.flatten(1).norm(dim=1).view(-1, *([1] * (x.ndim - 1)))


@torch.no_grad()
def adaptive_clip_(parameters, factor=0.01, eps=1e-3):
    for p in parameters:
        if p.grad is None:
            continue
        limit = unit_norm(p.detach()).clamp_(min=eps) * factor
        p.grad.mul_((limit / unit_norm(p.grad).clamp(min=1e-6)).clamp(max=1.0))  # expect: SCALER_GRADS_STILL_SCALED


def fit(model, batches, lr=0.1):
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler()
    criterion = torch.nn.CrossEntropyLoss()
    for x, y in batches:
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            loss = criterion(model(x.cuda()), y.cuda())
        opt.zero_grad()
        scaler.scale(loss).backward()
        adaptive_clip_(model.parameters())
        scaler.step(opt)
        scaler.update()
