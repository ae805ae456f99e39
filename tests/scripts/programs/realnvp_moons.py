import math
import torch
from torch import nn

torch.manual_seed(9)


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        a, b = x.chunk(2, -1)
        if self.flip:
            a, b = b, a
        with torch.autocast("cpu", dtype=torch.bfloat16):
            st = self.net(a)
        s, t = st.float().chunk(2, -1)
        s = 2 * torch.tanh(s / 2)
        b = b * s.exp() + t
        out = torch.cat([b, a] if self.flip else [a, b], -1)
        return out, s.squeeze(-1)


flow = nn.ModuleList([Coupling(i % 2 == 1) for i in range(6)])
opt = torch.optim.Adam(flow.parameters(), lr=5e-3)
hist = []
for step in range(200):
    a = torch.rand(64) * math.pi
    x = 0.3 * torch.stack([a.cos(), a.sin() - 0.5], 1) + 0.02 * torch.randn(64, 2)
    z, logdet = x, 0.0
    for layer in flow:
        z, ld = layer(z)
        logdet = logdet + ld
    nll = 0.5 * (z ** 2).sum(-1) + math.log(2 * math.pi) - logdet
    loss = nll.mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
    opt.step()
    hist.append(loss.item())
    if step % 20 == 19:
        print(f"step {step + 1} nll {sum(hist[-20:]) / 20:.4f}")
