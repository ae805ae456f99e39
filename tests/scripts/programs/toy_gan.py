import torch
import torch.nn as nn

torch.manual_seed(17)

G = nn.Sequential(nn.Linear(4, 24), nn.LeakyReLU(0.2), nn.Linear(24, 2))
D = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
optimizer_G = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
optimizer_D = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
adv = nn.BCEWithLogitsLoss()


def real_samples(n):
    t = torch.rand(n) * 6.2832
    return torch.stack([t.cos(), t.sin()], 1) + 0.05 * torch.randn(n, 2)


B = 32
valid, fake = torch.ones(B, 1), torch.zeros(B, 1)
for step in range(150):
    # ---- generator
    optimizer_G.zero_grad()
    z = torch.randn(B, 4)
    gen = G(z)
    g_loss = adv(D(gen), valid)
    g_loss.backward()
    optimizer_G.step()

    # ---- discriminator
    optimizer_G.zero_grad()
    real_loss = adv(D(real_samples(B)), valid)
    fake_loss = adv(D(gen.detach()), fake)
    d_loss = (real_loss + fake_loss) / 2
    d_loss.backward()
    optimizer_D.step()

print(f"D {d_loss.item():.4f}  G {g_loss.item():.4f}")
