import torch
from torch import nn

torch.manual_seed(300)
net = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 20))
opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.05)
scaler = torch.amp.GradScaler("cpu", growth_interval=30)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 4e-3, total_steps=120)
means = torch.randn(20, 128)
for step in range(120):
    y = torch.randint(0, 20, (64,))
    x = means[y] + 1.5 * torch.randn(64, 128)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x), y, label_smoothing=0.1) * 4
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    sched.step()
    if step % 20 == 0:
        print(step, loss.item(), scaler.get_scale())
