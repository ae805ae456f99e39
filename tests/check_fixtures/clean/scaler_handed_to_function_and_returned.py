import torch
import torch.nn.functional as F


def init(lr, model, amp):
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cuda", enabled=amp, init_scale=2.0**12, growth_interval=1000)
    return opt, scaler


def optimiser_step(scaler, opt, params, clip):
    scaler.unscale_(opt)
    norm = torch.nn.utils.clip_grad_norm_(params, clip)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    return norm


def train(model, loader, amp=True):
    opt, scaler = init(0.1, model, amp)
    params = list(model.parameters())
    norms = []
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16, enabled=amp):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
        scaler.scale(loss).backward()
        norms.append(optimiser_step(scaler, opt, params, 1.0))
    return torch.stack(norms).mean()
