import torch
import torch.nn.functional as F


def train(G, D, loader, z_dim=128, d_steps=2):
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-4)
    opt_d = torch.optim.Adam(D.parameters(), lr=4e-4)
    scaler_g, scaler_d = torch.amp.GradScaler("cuda"), torch.amp.GradScaler("cuda")
    for real in loader:
        real = real.cuda()
        for _ in range(d_steps):
            with torch.autocast("cuda", dtype=torch.float16):
                with torch.no_grad():
                    fake = G(torch.randn(len(real), z_dim, device="cuda"))
                d_loss = F.relu(1 - D(real)).float().mean() + F.relu(1 + D(fake)).float().mean()
            opt_d.zero_grad(set_to_none=True)
            scaler_d.scale(d_loss).backward()
            scaler_d.step(opt_d)
            scaler_d.update()
        with torch.autocast("cuda", dtype=torch.float16):
            g_loss = -D(G(torch.randn(len(real), z_dim, device="cuda"))).float().mean()
        opt_g.zero_grad(set_to_none=True)
        scaler_g.scale(g_loss).backward()
        scaler_g.step(opt_g)
        scaler_g.update()
