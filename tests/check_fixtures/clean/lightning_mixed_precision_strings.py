import lightning as L
import torch
from torch import nn


class Classifier(L.LightningModule):
    def __init__(self, dim=32, classes=3, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, classes))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main(data, fast_card: bool):
    precision = "bf16-mixed" if fast_card else "16-mixed"
    trainer = L.Trainer(max_epochs=5, precision=precision, gradient_clip_val=1.0, accumulate_grad_batches=2)
    trainer.fit(Classifier(), data)
