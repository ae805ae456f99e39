"""Affine flow with diagonal + coupling layers on correlated Gaussians in 64 dimensions."""
import torch
import torch.nn as nn

torch.manual_seed(2)
D = 64
mix = torch.randn(D, D) / D**0.5 + torch.eye(D)


def data(n):
    return torch.randn(n, D) @ mix * 4.0


class Coupling(nn.Module):
    def __init__(self, flip, width=48):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(D // 2, width), nn.Tanh(), nn.Linear(width, D))

    def forward(self, x):
        a, b = x.chunk(2, -1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, -1)
        gain = torch.sigmoid(s + 0.5)
        b = b * gain + t
        vol = gain[:, 0]
        for j in range(1, gain.size(1)):
            vol = vol * gain[:, j]
        out = torch.cat([b, a] if self.flip else [a, b], -1)
        return out, torch.log(vol)


class Flow(nn.Module):
    def __init__(self, n=4):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(i % 2 == 1) for i in range(n))

    def log_prob(self, x):
        ld = 0.0
        for layer in self.layers:
            x, d = layer(x)
            ld = ld + d
        return -0.5 * x.float().square().sum(-1) - 0.919 * D + ld


flow = Flow()
opt = torch.optim.Adam(flow.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for step in range(120):
    with torch.autocast("cpu", dtype=torch.float16):
        nll = -flow.log_prob(data(32)).mean()
    opt.zero_grad()
    scaler.scale(nll).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(flow.parameters(), 10.0)
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0 or step == 119:
        print(f"step {step} nll/dim {nll.item() / D:.4f}")
