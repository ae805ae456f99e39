import lightning.pytorch as pl
import torch
from torch import nn


class LitModel(pl.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def main(datamodule):
    trainer = pl.Trainer(
        max_epochs=20,
        accelerator="gpu",
        devices=1,
        precision="16-true",  # expect: CONFIG_TRUE_HALF
    )
    trainer.fit(LitModel(), datamodule)
