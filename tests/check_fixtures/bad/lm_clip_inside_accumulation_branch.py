"""Small GPT pre-training with gradient accumulation."""
import math

import torch
import torch.nn.functional as F

ACCUM = 8
CLIP = 1.0


def lr_at(step, warmup=200, total=20_000, base=6e-4):
    if step < warmup:
        return base * step / warmup
    ratio = (step - warmup) / (total - warmup)
    return 0.1 * base + 0.45 * base * (1 + math.cos(math.pi * ratio))


def pretrain(model, batches, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    amp_ctx = torch.autocast(device_type="cuda", dtype=torch.float16)
    optimizer.zero_grad(set_to_none=True)
    for i, (x, y) in enumerate(batches):
        with amp_ctx:
            logits = model(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1)) / ACCUM
        scaler.scale(loss).backward()
        if (i + 1) % ACCUM == 0:
            for group in optimizer.param_groups:
                group["lr"] = lr_at(i // ACCUM)
            if CLIP > 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)  # expect: SCALER_CLIP_BEFORE_UNSCALE
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
