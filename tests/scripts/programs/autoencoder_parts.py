import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 12))

    def forward(self, x):
        return self.net(x)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 64))

    def forward(self, z):
        return self.net(z)


class Quality(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(12, 1)

    def forward(self, z):
        return self.score(z).squeeze(-1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = Decoder()
        self.quality = Quality()

    def forward(self, x):
        z = self.encoder(x)
        return self.decoder(z), self.quality(z)


basis = torch.randn(8, 64)


def draw(n):
    code = torch.randn(n, 8)
    return code @ basis / 3 + 0.05 * torch.randn(n, 64), code.norm(dim=1)


model = Model()
params = list(model.encoder.parameters()) + list(model.decoder.parameters())
opt = torch.optim.Adam(params, lr=3e-3)
sched = torch.optim.lr_scheduler.StepLR(opt, 80, 0.5)

for step in range(200):
    x, target = draw(64)
    recon, q = model(x)
    rec_loss = F.mse_loss(recon, x)
    q_loss = F.mse_loss(q, target)
    loss = rec_loss + 0.1 * q_loss
    model.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    if step % 25 == 0:
        print(f"{step:4d} total {loss.item():.4f} rec {rec_loss.item():.4f} quality {q_loss.item():.4f}")
