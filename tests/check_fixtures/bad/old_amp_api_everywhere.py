import torch
import torch.nn as nn
from torch.cuda.amp import GradScaler
from torch.cuda.amp import autocast as amp_region


def train(model, loader, epochs=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = GradScaler()  # expect: REGION_DEPRECATED
    loss_fn = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            with amp_region():  # expect: REGION_DEPRECATED
                loss = loss_fn(model(x.cuda()), y.cuda())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()


@torch.inference_mode()
def evaluate(model, loader):
    hits = 0
    for x, y in loader:
        with torch.cuda.amp.autocast(enabled=True):  # expect: REGION_DEPRECATED
            hits += (model(x.cuda()).argmax(-1).cpu() == y).sum().item()
    return hits
