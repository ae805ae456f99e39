import torch
import torch.nn as nn

torch.manual_seed(3)

enc = nn.Sequential(nn.Linear(14, 20), nn.ReLU(), nn.Linear(20, 12), nn.ReLU())
head = nn.Linear(12, 5)
params = list(enc.parameters()) + list(head.parameters())
opt = torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=5e-4)

W = torch.randn(14, 5)


def batch(n=32):
    x = torch.randn(n, 14)
    return x, (x @ W).argmax(1)


def freeze(module):
    for p in module.parameters():
        p.requires_grad_(False)


def train_step():
    x, y = batch()
    opt.zero_grad(set_to_none=False)
    loss = nn.functional.cross_entropy(head(enc(x)), y)
    loss.backward()
    opt.step()
    return loss.item()


# phase 1: everything
for i in range(80):
    l1 = train_step()

# phase 2: the encoder stays as it is, only the head is refined
freeze(enc)
for g in opt.param_groups:
    g["lr"] = 0.01
for i in range(80):
    l2 = train_step()

print(f"phase 1 {l1:.3f}  phase 2 {l2:.3f}")
