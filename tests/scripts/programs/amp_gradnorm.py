import torch
import torch.nn as nn
import torch.nn.functional as F


def count_parameters(module):
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


torch.manual_seed(16)
model = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 3))
print("parameters", count_parameters(model))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
W = torch.randn(10, 3)


def grad_norm(params, scale):
    total = 0.0
    for p in params:
        p.grad.div_(scale)
        total += p.grad.pow(2).sum().item()
    return total ** 0.5


def batch(n=16):
    x = torch.randn(n, 10)
    return x, (x @ W).argmax(1)


norms, hist = [], []
for step in range(150):
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    norms.append(grad_norm(model.parameters(), scaler.get_scale()))
    scaler.step(opt)
    scaler.update()
    hist.append(loss.item())
    if (step + 1) % 25 == 0:
        print(f"step {step + 1} loss {sum(hist[-25:]) / 25:.4f} grad norm {norms[-1]:.3f}")
