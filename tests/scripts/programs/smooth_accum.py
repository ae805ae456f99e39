"""fp16, four micro-batches per update, label smoothing, clipping, OneCycle that skips with the scaler."""
import sys
import torch
import torch.nn as nn

amp = "--fp32" not in sys.argv
torch.manual_seed(71)


class Net(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.embed = nn.Linear(10, d)
        self.gate = nn.Parameter(torch.zeros(2))                 # ReZero
        self.ff = nn.ModuleList(nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(2))
        self.head = nn.Linear(d, 7)

    def forward(self, x):
        h = self.embed(x)
        for g, f in zip(self.gate, self.ff):
            h = h + g * f(h)
        return self.head(h)


means = torch.randn(7, 10) * 1.5
net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=8e-3, total_steps=70)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 20, growth_interval=30, enabled=amp)
crit = nn.CrossEntropyLoss(label_smoothing=0.1)
MICRO = 4
for update in range(70):
    opt.zero_grad()
    tot = 0.
    for _ in range(MICRO):
        y = torch.randint(0, 7, (8,))
        x = means[y] + torch.randn(8, 10)
        with torch.autocast("cpu", torch.float16, enabled=amp):
            loss = crit(net(x), y) / MICRO
        scaler.scale(loss).backward()
        tot += loss.item()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    s = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if scaler.get_scale() >= s:
        sched.step()
    if update % 7 == 6:
        print(f"update {update} loss {tot:.4f} scale {scaler.get_scale():g} gates {net.gate.tolist()}")
