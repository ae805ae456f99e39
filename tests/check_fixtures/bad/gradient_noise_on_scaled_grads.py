# Annealed gradient noise for a tabular MLP
import torch
from torch import nn

net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1)).to("cuda")
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
scaler = torch.amp.GradScaler("cuda")
mse = nn.MSELoss()

features = torch.randn(4096, 64)
target = torch.randn(4096, 1)

for step in range(2000):
    idx = torch.randint(0, 4096, (256,))
    xb, yb = features[idx].to("cuda"), target[idx].to("cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        pred = net(xb)
        loss = mse(pred, yb)
    opt.zero_grad()
    scaler.scale(loss).backward()

    sigma = 0.01 / (1 + step) ** 0.55
    with torch.no_grad():
        for w in net.parameters():
            w.grad.add_(torch.randn_like(w.grad), alpha=sigma)  # expect: SCALER_GRADS_STILL_SCALED

    scaler.step(opt)
    scaler.update()
    if step % 200 == 0:
        print(step, loss.item())
