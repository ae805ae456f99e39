import torch
import torch.nn.functional as F


def consistency_step(model, clean, noisy, opt, scaler):
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16, cache_enabled=False):
        with torch.no_grad():
            goal = F.softmax(model(clean), dim=-1)
        loss = F.kl_div(F.log_softmax(model(noisy), dim=-1), goal, reduction="batchmean")
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return loss.item()


def run(model, loader):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for clean, noisy in loader:
        consistency_step(model, clean.cuda(), noisy.cuda(), opt, scaler)
