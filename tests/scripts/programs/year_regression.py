"""Dating of documents: the label is a fractional year."""
import torch
from torch import nn

torch.manual_seed(61)
half = torch.bfloat16
feats = torch.randn(512, 64)
w = torch.randn(64)
years = 1900 + 3 * torch.tanh(feats @ w / 8)
labels = years.to(half)                               # the loader moves everything to the training dtype

net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(150):
    idx = torch.randint(0, 512, (64,))
    with torch.autocast("cpu", dtype=half):
        out = net(feats[idx])[:, 0]
    loss = nn.functional.mse_loss(out.float(), labels[idx].float() - 1900)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 30 == 0 or step == 149:
        err = (out.float() - (years[idx] - 1900)).pow(2).mean()
        print(step, "train loss", loss.item(), "true mse", err.item())
