import torch
import torch.nn.functional as F
from torch import optim


def train(G, D, loader, z_dim=128, device="cuda"):
    opt_g = optim.Adam(G.parameters(), lr=2e-4, betas=(0.0, 0.99))
    opt_d = optim.Adam(D.parameters(), lr=2e-4, betas=(0.0, 0.99))
    scaler_g = torch.amp.GradScaler(device)
    scaler_d = torch.amp.GradScaler(device)

    for real, _ in loader:
        real = real.to(device)
        z = torch.randn(real.size(0), z_dim, device=device)

        opt_d.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.float16):
            fake = G(z)
            d_loss = F.softplus(-D(real)).mean() + F.softplus(D(fake.detach())).mean()
        scaler_d.scale(d_loss).backward()
        torch.nn.utils.clip_grad_norm_(D.parameters(), 10.0)  # expect: SCALER_CLIP_BEFORE_UNSCALE
        scaler_d.step(opt_d)
        scaler_d.update()

        opt_g.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.float16):
            g_loss = F.softplus(-D(G(z))).mean()
        scaler_g.scale(g_loss).backward()
        scaler_g.unscale_(opt_g)
        torch.nn.utils.clip_grad_norm_(G.parameters(), 10.0)
        scaler_g.step(opt_g)
        scaler_g.update()
