"""1-D diffusion model: eps-prediction, zero-initialised output conv, warmup, fp32 weight EMA."""
import os, copy, math
import torch
import torch.nn as nn
import torch.nn.functional as F

LOWP = os.environ.get("PRECISION") != "fp32"
torch.manual_seed(64)
TS = 100
betas = torch.linspace(1e-4, .06, TS)
abar = torch.cumprod(1 - betas, 0)


class Eps(nn.Module):
    def __init__(self, c=20):
        super().__init__()
        self.inp = nn.Conv1d(1, c, 5, padding=2)
        self.time = nn.Sequential(nn.Linear(16, c), nn.SiLU(), nn.Linear(c, 2 * c))
        self.norm = nn.GroupNorm(4, c)
        self.mid = nn.Conv1d(c, c, 5, padding=2)
        self.out = nn.Conv1d(c, 1, 5, padding=2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x, t):
        fr = torch.exp(-math.log(1000.) * torch.arange(8) / 8)
        ph = t.float()[:, None] * fr
        sc, sh = self.time(torch.cat([ph.sin(), ph.cos()], 1)).unsqueeze(-1).chunk(2, 1)
        h = self.inp(x)
        h = h + self.mid(F.silu(self.norm(h) * (1 + sc) + sh))
        return self.out(F.silu(h))


net = Eps()
ema = copy.deepcopy(net).requires_grad_(False)
opt = torch.optim.AdamW(net.parameters(), lr=6e-3)
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1., (s + 1) / 20))
scaler = torch.amp.GradScaler("cpu", enabled=LOWP)
run = None
for step in range(100):
    u = torch.linspace(0, 6.28, 24)
    x0 = torch.sin(u + torch.rand(16, 1) * 6.28)[:, None]
    t = torch.randint(0, TS, (16,))
    e = torch.randn_like(x0)
    a = abar[t][:, None, None]
    xt = a.sqrt() * x0 + (1 - a).sqrt() * e
    with torch.autocast("cpu", torch.float16, enabled=LOWP):
        pe = net(xt, t)
    loss = F.mse_loss(pe.float(), e)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.)
    scaler.step(opt)
    scaler.update()
    warm.step()
    with torch.no_grad():
        for pa, pb in zip(ema.parameters(), net.parameters()):
            pa.lerp_(pb, .02)
    run = loss.item() if run is None else .9 * run + .1 * loss.item()
    if step % 10 == 9:
        print(f"[{step}] loss {run:.4f} scale {scaler.get_scale():g}")
