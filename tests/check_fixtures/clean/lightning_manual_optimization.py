import lightning as L
import torch
import torch.nn.functional as F


class LitGAN(L.LightningModule):
    def __init__(self, generator, discriminator, z_dim=100):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator, self.z_dim = generator, discriminator, z_dim

    def training_step(self, batch, _):
        real, _ = batch
        g_opt, d_opt = self.optimizers()
        z = torch.randn(len(real), self.z_dim, device=self.device)

        fake = self.generator(z).detach()
        d_loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
        d_opt.zero_grad()
        self.manual_backward(d_loss)
        d_opt.step()

        g_loss = F.softplus(-self.discriminator(self.generator(z))).mean()
        g_opt.zero_grad()
        self.manual_backward(g_loss)
        g_opt.step()
        self.log_dict({"d": d_loss, "g": g_loss})

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.generator.parameters(), lr=2e-4),
            torch.optim.Adam(self.discriminator.parameters(), lr=2e-4),
        )


def main(module, data):
    L.Trainer(max_epochs=10, precision="16-mixed").fit(module, data)
