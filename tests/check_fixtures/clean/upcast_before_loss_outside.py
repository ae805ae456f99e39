import torch
import torch.nn.functional as F


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(x.cuda())
        logits = logits.float()
        loss = F.cross_entropy(logits, y.cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def evaluate(model, loader):
    model.eval()
    nll, n = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                out = model(x.cuda())
            nll += F.cross_entropy(out.to(torch.float32), y.cuda(), reduction="sum").item()
            n += len(y)
    return nll / n
