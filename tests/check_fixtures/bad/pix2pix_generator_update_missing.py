import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F


class Pix2Pix:
    """Conditional GAN with an L1 term, one scaler per network."""

    def __init__(self, generator, discriminator, lr=2e-4, weight=100.0):
        self.G, self.D = generator.cuda(), discriminator.cuda()
        self.weight = weight
        self.opt_g = torch.optim.Adam(self.G.parameters(), lr=lr, betas=(0.5, 0.999))
        self.opt_d = torch.optim.Adam(self.D.parameters(), lr=lr, betas=(0.5, 0.999))
        self.scaler_g = torch.amp.GradScaler("cuda")
        self.scaler_d = torch.amp.GradScaler("cuda")
        self.bce = nn.BCEWithLogitsLoss()
        self.counter = itertools.count()

    def gan_loss(self, logits, real):
        return self.bce(logits, torch.full_like(logits, float(real)))

    def step_d(self, cond, target):
        self.opt_d.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            fake = self.G(cond).detach()
            loss = self.gan_loss(self.D(torch.cat([cond, target], 1)), True)
            loss = loss + self.gan_loss(self.D(torch.cat([cond, fake], 1)), False)
        self.scaler_d.scale(loss).backward()
        self.scaler_d.step(self.opt_d)
        self.scaler_d.update()
        return loss.item()

    def step_g(self, cond, target):
        self.opt_g.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            fake = self.G(cond)
            loss = self.gan_loss(self.D(torch.cat([cond, fake], 1)), True)
            loss = loss + self.weight * F.l1_loss(fake, target)
        self.scaler_g.scale(loss).backward()
        self.scaler_g.step(self.opt_g)  # expect: SCALER_UPDATE_MISSING
        return loss.item()

    def fit(self, loader):
        for cond, target in loader:
            cond, target = cond.cuda(), target.cuda()
            d, g = self.step_d(cond, target), self.step_g(cond, target)
            if next(self.counter) % 100 == 0:
                print(f"d {d:.3f} g {g:.3f}")
