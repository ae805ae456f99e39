import torch
from torch import nn, optim

torch.manual_seed(99)


class Encoder(nn.Module):
    def __init__(self, d_in, d_z):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d_in, 24), nn.ELU(), nn.Linear(24, d_z))

    def forward(self, x):
        return self.net(x)


class Decoder(nn.Module):
    def __init__(self, d_z, d_out):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d_z, 24), nn.ELU(), nn.Linear(24, d_out))

    def forward(self, z):
        return self.net(z)


class AutoEncoder(nn.Module):
    def __init__(self, d=18, z=4):
        super().__init__()
        self.encoder, self.decoder = Encoder(d, z), Decoder(z, d)
        self.last_code = None

    def forward(self, x):
        z = self.encoder(x).data
        self.last_code = z
        return self.decoder(z)


basis = torch.randn(4, 18)
ae = AutoEncoder()
opt = optim.RMSprop(ae.parameters(), lr=2e-3)
log = []
for it in range(1, 181):
    x = torch.tanh(torch.randn(40, 4) @ basis)
    rec = ae(x)
    loss = ((rec - x) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 30 == 0:
        log.append((it, loss.item(), ae.last_code.std().item()))
print("reconstruction", log[-1][1])
