"""Autoencoder with separate optimizers for encoder and decoder."""
import sys
import torch
from torch import nn

mixed = "--fp32" not in sys.argv
torch.manual_seed(4)
enc = nn.Sequential(nn.Linear(20, 32), nn.ELU(), nn.Linear(32, 4))
dec = nn.Sequential(nn.Linear(4, 32), nn.ELU(), nn.Linear(32, 20))
opt_e = torch.optim.SGD(enc.parameters(), lr=0.05, momentum=0.9)
opt_d = torch.optim.SGD(dec.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=mixed)
mix = torch.randn(4, 20)


def reconstruct(x):
    with torch.autocast("cpu", torch.float16, enabled=mixed):
        y = dec(enc(x))
    return nn.functional.mse_loss(y.float(), x)


for it in range(60):
    x = torch.randn(32, 4) @ mix + .05 * torch.randn(32, 20)
    loss = reconstruct(x)
    for o in (opt_e, opt_d):
        o.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt_e)
    opt_d.step()
    scaler.update()
    print("it", it, "rec", loss.item(), "scale", scaler.get_scale())
