"""Saves the weights for deployment; not a checkpoint to resume from."""
import torch
import torch.nn.functional as F


def train(model, loader, epochs, out):
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    best = float("inf")
    for _ in range(epochs):
        total = 0.0
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            total += loss.item()
        if total < best:
            best = total
            torch.save(model.state_dict(), out)
            half = {k: v.half() if v.is_floating_point() else v for k, v in model.state_dict().items()}
            torch.save(half, out + ".fp16")
