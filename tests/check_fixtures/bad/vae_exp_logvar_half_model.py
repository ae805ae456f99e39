import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, dim=784, z=32):
        super().__init__()
        self.h = nn.Linear(dim, 400)
        self.mu = nn.Linear(400, z)
        self.logvar = nn.Linear(400, z)

    def forward(self, x):
        h = torch.relu(self.h(x))
        return self.mu(h), self.logvar(h)


@torch.no_grad()
def sample_codes(encoder, x):
    mu, logvar = encoder(x.half())
    std = torch.exp(0.5 * logvar)  # expect: NUM_EXP_HALF
    return mu + std * torch.randn_like(mu)


def main(path, loader):
    enc = Encoder()
    enc.load_state_dict(torch.load(path, weights_only=True))
    enc = enc.half().cuda().eval()
    for i, (x, _) in enumerate(loader):
        torch.save(sample_codes(enc, x.cuda().flatten(1)).cpu(), f"codes_{i}.pt")
