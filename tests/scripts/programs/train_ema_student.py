import copy

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(9, verbose=False)


class SpectraClassifier(L.LightningModule):
    def __init__(self, width=48, n_classes=5, decay=0.997):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(40, width), nn.GELU(), nn.LayerNorm(width),
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, n_classes),
        )
        self.avg = copy.deepcopy(self.net).to(torch.bfloat16).requires_grad_(False)
        self.decay = decay

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for a, p in zip(self.avg.parameters(), self.net.parameters()):
            a.mul_(self.decay).add_(p.to(a.dtype), alpha=1 - self.decay)

    def validation_step(self, batch, _):
        x, y = batch
        logits = self.avg(x.to(next(self.avg.parameters()).dtype)).float()
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_acc", (logits.argmax(1) == y).float().mean())

    def on_validation_epoch_end(self):
        m = self.trainer.callback_metrics
        if not self.trainer.sanity_checking:
            print(f"epoch {self.current_epoch} train {m['train_loss']:.3f} val {m['val_loss']:.3f} acc {m['val_acc']:.3f}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=2e-3)


def spectra(n):
    y = torch.randint(0, 5, (n,))
    grid = torch.linspace(0, 1, 40)
    peak = torch.exp(-((grid[None] - (0.15 + 0.17 * y[:, None])) ** 2) / 0.003)
    return TensorDataset(peak + 0.25 * torch.randn(n, 40), y)


if __name__ == "__main__":
    train, val = spectra(480), spectra(128)
    trainer = L.Trainer(max_epochs=7, precision="bf16-mixed", accelerator="cpu", logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                        num_sanity_val_steps=0)
    trainer.fit(SpectraClassifier(), DataLoader(train, 16, shuffle=True), DataLoader(val, 64))
