import logging
import warnings

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
L.seed_everything(3)

x = torch.randn(6, 3, 16, 16)
y = torch.randint(0, 6, (512,))
dataset = TensorDataset(x[y] + 0.8 * torch.randn(512, 3, 16, 16), y)


class LitViT(L.LightningModule):
    def __init__(self, lr=2e-3, warmup_steps=20, total_steps=128):
        super().__init__()
        self.save_hyperparameters()
        self.vit = ViTForImageClassification(ViTConfig(
            image_size=16, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=64, num_labels=6))
        self.losses = []

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = self.vit(pixel_values=images, labels=labels).loss
        self.losses.append(loss.item())
        if len(self.losses) % 16 == 0:
            print(f"step {len(self.losses)} loss {sum(self.losses[-16:]) / 16:.4f}")
        return loss

    def lr_at(self, step):
        h = self.hparams
        if step < h.warmup_steps:
            return step / h.warmup_steps
        return max(0.0, (h.total_steps - step) / (h.total_steps - h.warmup_steps))

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.LambdaLR(opt, self.lr_at)
        return [opt], [sched]


trainer = L.Trainer(max_epochs=4, precision="bf16-mixed", accelerator="cpu", logger=False,
                    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(LitViT(), DataLoader(dataset, batch_size=16, shuffle=True))
