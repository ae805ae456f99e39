import logging
import warnings

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2ForSequenceClassification

warnings.filterwarnings("ignore")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
pl.seed_everything(1)


def make_reviews(n):
    g = torch.Generator().manual_seed(3)
    y = torch.randint(0, 2, (n,), generator=g)
    x = torch.randint(20, 60, (n, 16), generator=g)
    for i in range(n):
        pos = torch.randperm(15, generator=g)[:4]
        x[i, pos] = torch.randint(0, 10, (4,), generator=g) + 10 * y[i]
    return TensorDataset(x, y)


class ReviewClassifier(pl.LightningModule):
    def __init__(self, lr=1e-4):
        super().__init__()
        config = GPT2Config(
            vocab_size=64, n_positions=32, n_embd=48, n_layer=2, n_head=4,
            initializer_range=0.15, num_labels=2, pad_token_id=63,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
        self.model = GPT2ForSequenceClassification(config)
        self.lr = lr
        self.history = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.model(input_ids=x, labels=y)
        self.history.append(out.loss.detach().float().item())
        if self.global_step % 25 == 0:
            print(f"step {self.global_step} loss {self.history[-1]:.4f}")
        return out.loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


module = ReviewClassifier()
loader = DataLoader(make_reviews(256), batch_size=16, shuffle=True)
trainer = pl.Trainer(
    max_steps=200, precision="bf16-true", accelerator="cpu", logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    gradient_clip_val=1.0,
)
trainer.fit(module, loader)
print(f"final loss {sum(module.history[-16:]) / 16:.4f}")
