import torch
import torch.nn.functional as F


def train_epoch(model, loader, optimizer, scaler, accumulate):
    n = len(loader)
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x.cuda()), y.cuda()) / accumulate
        scaler.scale(loss).backward()
        if (i + 1) % accumulate and i + 1 < n:
            continue
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


def main(model, loader, epochs=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(epochs):
        train_epoch(model, loader, optimizer, scaler, 8)
