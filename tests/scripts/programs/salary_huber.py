import torch
from torch import nn

torch.manual_seed(10)
net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=200)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 20, growth_interval=40)
W = torch.randn(8)

hist, skipped = [], 0
for step in range(200):
    x = torch.randn(32, 8)
    y = 900 + 250 * torch.tanh(x @ W / 2) + 100 * x[:, 1]
    out = torch.rand(32) < 0.05
    y = torch.where(out, y + 3000 * torch.rand(32), y)
    with torch.autocast("cpu", dtype=torch.float16):
        pred = net(x).squeeze(-1)
    loss = nn.functional.huber_loss(100 * pred.float(), y, delta=50.0)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 100.0)
    before = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if scaler.get_scale() < before:
        skipped += 1
    else:
        sched.step()
    hist.append(loss.item())
    if step % 20 == 19:
        print(f"step {step + 1} loss {sum(hist[-20:]) / 20:.1f} scale {scaler.get_scale():.0f} skipped {skipped}")
