"""Masked image modelling, one epoch function with accumulation and a clip option."""
import argparse
import datetime
import time

import torch
import torch.nn as nn


class Meter:
    def __init__(self):
        self.value = self.total = 0.0
        self.count = 0

    def update(self, value, n=1):
        self.value = value
        self.total += value * n
        self.count += n

    @property
    def average(self):
        return self.total / max(1, self.count)


class MaskedAutoencoder(nn.Module):
    def __init__(self, patch=48, dim=192, depth=2):
        super().__init__()
        self.embed = nn.Linear(patch, dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth)
        self.decode = nn.Linear(dim, patch)

    def forward(self, patches, mask):
        tokens = self.embed(patches)
        tokens = torch.where(mask[..., None], self.mask_token.to(tokens.dtype), tokens)
        recon = self.decode(self.blocks(tokens))
        return nn.functional.l1_loss(recon[mask], patches[mask])


def train_one_epoch(args, model, loader, optimizer, scaler, epoch):
    model.train()
    optimizer.zero_grad()
    loss_meter, norm_meter = Meter(), Meter()
    start = time.time()
    for idx, (patches, mask) in enumerate(loader):
        patches, mask = patches.cuda(non_blocking=True), mask.cuda(non_blocking=True)
        with torch.amp.autocast("cuda", dtype=torch.float16, enabled=True):
            loss = model(patches, mask)
        if args.accumulation_steps > 1:
            loss = loss / args.accumulation_steps
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)  # expect: SCALER_IN_ACCUMULATION
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            if (idx + 1) % args.accumulation_steps == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        else:
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            scaler.step(optimizer)
            scaler.update()
        loss_meter.update(loss.item(), patches.size(0))
        norm_meter.update(float(norm))
    spent = datetime.timedelta(seconds=int(time.time() - start))
    print(f"epoch {epoch} took {spent}, loss {loss_meter.average:.4f}, norm {norm_meter.average:.3f}")


def main(loader):
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulation-steps", type=int, default=4)
    parser.add_argument("--clip", type=float, default=5.0)
    parser.add_argument("--epochs", type=int, default=100)
    args = parser.parse_args()
    model = MaskedAutoencoder().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.999))
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(args.epochs):
        train_one_epoch(args, model, loader, optimizer, scaler, epoch)
