import math
import torch
from torch import nn

torch.manual_seed(9)


class Generator(nn.Module):
    def __init__(self, z=8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(z, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))

    def forward(self, z):
        return self.net(z)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


class GANTrainer:
    def __init__(self):
        self.G, self.D = Generator(), Critic()
        self.opt_g = torch.optim.Adam(self.G.parameters(), lr=1e-3, betas=(0.5, 0.99))
        self.opt_d = torch.optim.Adam(self.D.parameters(), lr=1e-3, betas=(0.5, 0.99))
        self.bce = nn.BCEWithLogitsLoss()

    def real(self, n):
        a = torch.rand(n) * 2 * math.pi
        return torch.stack([a.cos(), a.sin()], 1) * 2 + 0.05 * torch.randn(n, 2)

    def train_d(self, n):
        fake = self.G(torch.randn(n, 8)).detach()
        self.opt_d.zero_grad()
        loss = self.bce(self.D(self.real(n)), torch.ones(n)) + self.bce(self.D(fake), torch.zeros(n))
        loss.backward()
        self.opt_d.step()
        return loss.item()

    def train_g(self, n):
        self.opt_d.zero_grad()
        loss = self.bce(self.D(self.G(torch.randn(n, 8))), torch.ones(n))
        loss.backward()
        self.opt_g.step()
        return loss.item()

    def run(self, steps):
        for s in range(1, steps + 1):
            d = self.train_d(64)
            g = self.train_g(64)
            if s % 50 == 0:
                r = self.G(torch.randn(256, 8)).norm(dim=1).mean().item()
                print(f"step {s} loss_d {d:.4f} loss_g {g:.4f} radius {r:.3f}")


if __name__ == "__main__":
    GANTrainer().run(250)
