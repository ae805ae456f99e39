import torch
import torch.nn.functional as F


def chunks(tensor, n):
    return torch.chunk(tensor, n, dim=0)


def train_step(model, optimizer, scaler, tokens, targets, n_micro):
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for tok, tgt in zip(chunks(tokens, n_micro), chunks(targets, n_micro)):
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(tok)
            loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tgt.reshape(-1)) / n_micro
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # expect: SCALER_IN_ACCUMULATION
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return total


def main(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cuda")
    for tokens, targets in batches:
        print(train_step(model, optimizer, scaler, tokens.cuda(), targets.cuda(), n_micro=8))
