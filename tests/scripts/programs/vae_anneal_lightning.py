import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import warnings; warnings.filterwarnings("ignore")

L.seed_everything(13)


class VAE(L.LightningModule):
    def __init__(self, warm=450):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 16))
        self.dec = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 48))
        self.warm = warm
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch, idx):
        (x,) = batch
        self.seen += 1                                   # checkpointed progress of the KL warm-up
        beta = torch.clamp(self.seen / self.warm, max=1.0)
        mu, logvar = self.enc(x).chunk(2, -1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        rec = ((self.dec(z) - x) ** 2).mean(0).sum()
        kl = 0.5 * (mu ** 2 + logvar.exp() - 1 - logvar).mean(0).sum()
        self.beta, self.kl = float(beta), float(kl)
        return rec + beta * kl

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


g = torch.Generator().manual_seed(2)
data = torch.tanh(torch.randn(512, 6, generator=g) @ torch.randn(6, 48, generator=g))
dl = DataLoader(TensorDataset(data), batch_size=16, shuffle=True)
model = VAE()
trainer = L.Trainer(max_steps=500, max_epochs=-1, accelerator="cpu", precision="bf16-true", logger=False,
                    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(model, dl)
print("beta at the end", model.beta, "kl", model.kl)
