import torch
from torch import nn

torch.manual_seed(15)
basis = torch.randn(3, 20)
enc = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 8))
dec = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 20))
opt_e = torch.optim.Adam(enc.parameters(), lr=3e-3)
opt_d = torch.optim.Adam(dec.parameters(), lr=3e-3)
hist = []
for step in range(200):
    x = torch.randn(32, 3) @ basis + 0.1 * torch.randn(32, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stats = enc(x)
    mu, logvar = stats.float().chunk(2, -1)
    logvar = logvar.clamp(-8, 4)
    z = mu + (0.5 * logvar).exp() * torch.randn_like(mu)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rec = dec(z)
    recon = ((rec.float() - x) ** 2).sum(-1).mean()
    kl = -0.5 * (1 + logvar - mu ** 2 - logvar.exp()).sum(-1).mean()
    beta = min(1.0, max(0.0, (step - 30) / 100))
    loss = recon + beta * kl
    opt_e.zero_grad()
    opt_d.zero_grad()
    loss.backward()
    opt_e.step()
    opt_d.step()
    hist.append((recon.item(), kl.item()))
    if step % 20 == 19:
        r, k = (sum(v[i] for v in hist[-20:]) / 20 for i in (0, 1))
        print(f"step {step + 1} recon {r:.3f} kl {k:.3f} beta {beta:.2f}")
