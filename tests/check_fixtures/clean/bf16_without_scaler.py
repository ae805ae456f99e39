import torch
import torch.nn.functional as F


def train(model, loader, steps, lr=3e-4):
    opt = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-8)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for step, (x, y) in enumerate(loader):
        if step == steps:
            break
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(x.cuda())
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.cuda().view(-1))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        if step % 100 == 0:
            print(step, loss.item(), norm.item())
