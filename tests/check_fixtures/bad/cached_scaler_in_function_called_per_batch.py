import torch
import torch.nn.functional as F


def optimise(model, optimizer, loss):
    scaler = torch.amp.GradScaler("cuda")  # expect: SCALER_REBUILT
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def train(model, loader, lr=1e-4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
        optimise(model, optimizer, loss)
