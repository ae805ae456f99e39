import torch
import torch.nn as nn


def train_epoch(model, loader, optimizer, criterion, scaler=None, clip=None):
    model.train()
    for x, y in loader:
        x, y = x.cuda(), y.cuda()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=scaler is not None):
            loss = criterion(model(x), y)
        if scaler is not None:
            scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()


def main(model, loader, amp):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda") if amp else None
    for _ in range(10):
        train_epoch(model, loader, optimizer, nn.CrossEntropyLoss(), scaler, clip=1.0)
