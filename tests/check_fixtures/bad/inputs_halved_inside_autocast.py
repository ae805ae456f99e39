import torch
import torch.nn.functional as F


def train_epoch(model, loader, optimizer, scaler):
    model.train()
    for frames, boxes in loader:
        frames, boxes = frames.cuda(), boxes.cuda()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            frames = frames.half()  # expect: HALF_CALL
            pred = model(frames)
            loss = F.smooth_l1_loss(pred, boxes)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()


def main(model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(12):
        train_epoch(model, loader, optimizer, scaler)
