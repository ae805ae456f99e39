import torch
import torch.nn as nn
import torch.nn.functional as F


class Disc(nn.Module):
    def __init__(self, ch=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, ch, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(ch, 1, 4, 2, 1),
            nn.Flatten(),
            nn.LazyLinear(1),
        )

    def forward(self, x):
        return torch.sigmoid(self.net(x))


def d_step(D, G, real, opt, scaler):
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        fake = G(torch.randn(len(real), 100, device="cuda")).detach()
        p_real, p_fake = D(real), D(fake)
        loss = F.binary_cross_entropy(p_real, torch.ones_like(p_real))  # expect: REGION_BCE
        loss = loss + F.binary_cross_entropy(p_fake, torch.zeros_like(p_fake))  # expect: REGION_BCE
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return loss.item()


def train(G, loader):
    D = Disc().cuda()
    opt = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
    scaler = torch.amp.GradScaler("cuda")
    for real, _ in loader:
        d_step(D, G, real.cuda(), opt, scaler)
