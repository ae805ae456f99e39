import logging
import warnings

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForTokenClassification

warnings.filterwarnings("ignore")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
pl.seed_everything(0)


def build_dataset(n=400, length=12):
    x = torch.randint(0, 40, (n, length))
    prev = torch.roll(x, 1, dims=1)
    prev[:, 0] = 0
    y = ((x % 2) + 2 * (prev % 2)).long()
    return TensorDataset(x, y)


class Tagger(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = BertForTokenClassification(BertConfig(
            vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=16, num_labels=4, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, initializer_range=0.05))
        self.seen = []

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        sch = self.lr_schedulers()
        x, y = batch
        loss = self.net(input_ids=x, labels=y).loss
        self.manual_backward(loss)
        opt.step()
        sch.step()
        self.seen.append(loss.item())
        if len(self.seen) % 25 == 0:
            print(f"step {len(self.seen)} loss {sum(self.seen[-25:]) / 25:.4f}")

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [opt], [torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=150)]


trainer = pl.Trainer(max_epochs=3, precision="bf16-mixed", accelerator="cpu", logger=False,
                     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Tagger(), DataLoader(build_dataset(), batch_size=8, shuffle=True))
