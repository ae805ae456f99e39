import torch
import torch.nn.functional as F


def train(G, D, loader, z_dim=64):
    """The discriminator is tiny and stays in fp32; the generator runs in fp16."""
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-4, betas=(0.0, 0.9))
    opt_d = torch.optim.Adam(D.parameters(), lr=4e-4, betas=(0.0, 0.9))
    scaler_g = torch.amp.GradScaler("cuda")
    for real, _ in loader:
        real = real.cuda()
        z = torch.randn(real.size(0), z_dim, device="cuda")
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            fake = G(z)
        opt_d.zero_grad(set_to_none=True)
        d_loss = F.softplus(-D(real)).mean() + F.softplus(D(fake.float())).mean()
        d_loss.backward()
        opt_d.step()

        opt_g.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            g_loss = F.softplus(-D(G(z))).mean()
        scaler_g.scale(g_loss).backward()
        scaler_g.step(opt_g)
        scaler_g.update()
