import torch
from torch import nn

torch.manual_seed(14)


class Radial(nn.Module):
    def __init__(self, n=8, cutoff=5.0):
        super().__init__()
        self.register_buffer("k", torch.arange(1, n + 1) * 3.14159 / cutoff)

    def forward(self, r):
        r = r[..., None]
        return torch.where(r > 0, torch.sin(self.k * r) / r, self.k.expand(*r.shape[:-1], -1))


class Net(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.shift = nn.Linear(3, 3)
        self.radial = Radial()
        self.emb = nn.Embedding(4, d)
        self.filt = nn.Linear(8, d)
        self.out = nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, 1))

    def forward(self, z, pos):
        pos = pos + 0.1 * self.shift(pos)
        diff = pos[:, :, None] - pos[:, None]
        r = torch.linalg.vector_norm(diff, dim=-1)
        w = self.filt(self.radial(r))
        h = (w * self.emb(z)[:, None]).sum(2)
        return self.out(h).sum((1, 2))


def molecules(n=8, a=6):
    z = torch.randint(0, 4, (n, a))
    pos = torch.randn(n, a, 3) * 1.5
    r = torch.cdist(pos, pos) + 10 * torch.eye(a)
    charge = z.float() - 1.5
    e = (charge[:, :, None] * charge[:, None] * torch.exp(-r)).sum((1, 2)) / 2
    return z, pos, e


model = Net()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(120):
    z, pos, e = molecules()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(z, pos)
    loss = nn.functional.mse_loss(pred.float(), e)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if step % 12 == 0 or step == 119:
        print(f"step {step} loss {loss.item():.4f}")
