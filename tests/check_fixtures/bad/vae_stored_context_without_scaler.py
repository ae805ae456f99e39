import torch
from torch import nn


class VAE(nn.Module):
    def __init__(self, dim=784, latent=20):
        super().__init__()
        self.enc = nn.Linear(dim, 400)
        self.mu = nn.Linear(400, latent)
        self.logvar = nn.Linear(400, latent)
        self.dec = nn.Sequential(nn.Linear(latent, 400), nn.ReLU(), nn.Linear(400, dim))

    def forward(self, x):
        h = torch.relu(self.enc(x))
        mu, logvar = self.mu(h).float(), self.logvar(h).float()
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.dec(z), mu, logvar


def elbo(logits, x, mu, logvar):
    rec = nn.functional.binary_cross_entropy_with_logits(logits, x, reduction="sum")
    kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return (rec + kl) / x.size(0)


half_region = torch.autocast("cuda", dtype=torch.float16)


def train(loader, epochs=10):
    vae = VAE().cuda()
    adam = torch.optim.Adam(vae.parameters(), lr=1e-3)
    for _ in range(epochs):
        for x, _ in loader:
            x = x.cuda().flatten(1)
            with half_region:
                logits, mu, logvar = vae(x)
                loss = elbo(logits, x, mu, logvar)
            adam.zero_grad()
            loss.backward()  # expect: SCALER_MISSING
            adam.step()
    return vae
