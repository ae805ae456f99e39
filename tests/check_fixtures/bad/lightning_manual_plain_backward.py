import lightning.pytorch as pl
import torch
import torch.nn.functional as F


class LitAutoencoder(pl.LightningModule):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.automatic_optimization = False
        self.encoder, self.decoder = encoder, decoder

    def training_step(self, batch, batch_idx):
        x, _ = batch
        opt = self.optimizers()
        recon = self.decoder(self.encoder(x))
        loss = F.mse_loss(recon, x)
        opt.zero_grad()
        loss.backward()  # expect: CONFIG_DOUBLE_SCALING
        opt.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def run(encoder, decoder, loader):
    trainer = pl.Trainer(max_epochs=3, precision="16-mixed", accelerator="gpu")
    trainer.fit(LitAutoencoder(encoder, decoder), loader)
