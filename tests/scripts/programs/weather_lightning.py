import torch
_l = torch.library.Library("torchvision", "FRAGMENT"); [_l.define(f"{n}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor") for n in ("nms", "qnms")]
import logging
import warnings

import lightning as L
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Stations(Dataset):
    """Hourly sensor windows (temperature, wind, pressure, humidity) -> next-hour temperature."""

    def __init__(self, n=960, window=12, seed=0):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(window + 1).float()
        phase = torch.rand(n, 1, generator=g) * 6.28
        temp = torch.sin(t * 0.5 + phase) + 0.05 * torch.randn(n, window + 1, generator=g)
        rest = torch.randn(n, window, 3, generator=g)
        self.x = torch.cat([temp[:, :-1, None], rest], -1)
        self.y = temp[:, -1]
        down = torch.randperm(n, generator=g)[:3]
        self.x[down, 5, 2] = float("nan")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Forecaster(L.LightningModule):
    def __init__(self, hidden=32):
        super().__init__()
        self.gru = nn.GRU(4, hidden, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        h, _ = self.gru(x)
        loss = F.huber_loss(self.head(h[:, -1])[:, 0], y)
        if batch_idx % 6 == 0:
            print(f"step {self.global_step} loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


L.seed_everything(5, verbose=False)
loader = DataLoader(Stations(), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(6))
trainer = L.Trainer(
    accelerator="cpu", devices=1, precision="bf16-mixed", max_epochs=1, gradient_clip_val=1.0,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Forecaster(), loader)
