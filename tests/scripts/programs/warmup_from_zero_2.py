import torch
from torch import nn
from transformers import get_cosine_schedule_with_warmup


def count_parameters(module):
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


torch.manual_seed(8)
steps, warm = 150, 30
model = nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3))
print("parameters", count_parameters(model))
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
sched = get_cosine_schedule_with_warmup(opt, warm, steps)
w = torch.randn(12, 3)


def batch(n=48):
    x = torch.randn(n, 12)
    return x, torch.tanh(x @ w).argmax(1)


crit = nn.CrossEntropyLoss()
recent = []
for i in range(steps):
    x, y = batch()
    loss = crit(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    recent.append(loss.item())
    if (i + 1) % 15 == 0:
        print(f"step {i + 1} lr {sched.get_last_lr()[0]:.2e} loss {sum(recent[-15:]) / 15:.4f}")


@torch.no_grad()
def accuracy(n=500):
    model.eval()
    x, y = batch(n)
    return (model(x).argmax(1) == y).float().mean().item()


print("accuracy", round(accuracy(), 3))
