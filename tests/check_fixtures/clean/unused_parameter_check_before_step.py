import torch
import torch.nn.functional as F


def warn_unused(model):
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if missing:
        print("no gradient for", ", ".join(missing))


def freeze_embedding_gradients(model):
    for p in model.embed.parameters():
        p.grad = None


def train(model, loader):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
        scaler.scale(loss).backward()
        warn_unused(model)
        freeze_embedding_gradients(model)
        scaler.step(opt)
        scaler.update()
