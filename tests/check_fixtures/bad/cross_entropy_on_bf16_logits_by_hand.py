import torch
import torch.nn.functional as F


def lm_loss(logits, labels, ignore=-100):
    shift = logits[:, :-1].contiguous().view(-1, logits.size(-1))
    gold = labels[:, 1:].contiguous().view(-1)
    return F.cross_entropy(shift.to(torch.bfloat16), gold, ignore_index=ignore)  # expect: HALF_LOSS_INPUT


def train(model, loader, optimizer, clip=1.0):
    model.train()
    for batch in loader:
        ids = batch["input_ids"].cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            hidden = model(ids)
        logits = hidden.float()
        loss = lm_loss(logits, ids)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
