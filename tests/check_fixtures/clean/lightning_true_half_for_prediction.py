import lightning.pytorch as pl
import torch
from torch import nn


class Embedder(pl.LightningModule):
    def __init__(self, dim=256):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1024, dim), nn.ReLU(), nn.Linear(dim, dim))

    def predict_step(self, batch, batch_idx):
        return self.net(batch)


def export(checkpoint, loader, out):
    model = Embedder.load_from_checkpoint(checkpoint)
    trainer = pl.Trainer(accelerator="gpu", precision="16-true", logger=False)
    parts = trainer.predict(model, loader)
    torch.save(torch.cat(parts).float(), out)


if __name__ == "__main__":
    data = torch.utils.data.DataLoader(torch.randn(512, 1024), batch_size=64)
    export("embedder.ckpt", data, "embeddings.pt")
