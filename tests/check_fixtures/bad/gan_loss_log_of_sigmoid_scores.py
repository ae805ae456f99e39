import torch
from torch import nn


class Discriminator(nn.Module):
    def __init__(self, ch=32):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, ch, 4, 2, 1), nn.LeakyReLU(0.2), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.head = nn.Linear(16 * ch, 1)


def train(G, loader, z=100):
    D = Discriminator().cuda()
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
    scaler = torch.amp.GradScaler("cuda")
    G.eval().requires_grad_(False)
    for real, _ in loader:
        real = real.cuda()
        opt_d.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            fake = G(torch.randn(len(real), z, device="cuda"))
            score_real = torch.sigmoid(D.head(D.features(real)))
            score_fake = D.head(D.features(fake)).sigmoid()
            loss = -score_real.log().mean()  # expect: NUM_LOG_OF_SIGMOID
            loss = loss - (1 - score_fake).log().mean()  # expect: NUM_LOG_OF_SIGMOID
        scaler.scale(loss).backward()
        scaler.step(opt_d)
        scaler.update()
