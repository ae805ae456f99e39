import torch
import torch.nn.functional as F


def grad_norms(model):
    return {n: p.grad.norm().item() for n, p in model.named_parameters() if p.grad is not None}


def train(model, loader, every=100):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for step, (x, y) in enumerate(loader):
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
        scaler.scale(loss).backward()
        if step % every == 0:
            scaler.unscale_(opt)
            print(step, grad_norms(model))
        scaler.step(opt)
        scaler.update()
