import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Encoder(nn.Module):
    def __init__(self, d_in, d):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d_in, d), nn.GELU(), nn.Linear(d, d), nn.GELU(), nn.Linear(d, 16))

    def forward(self, x):
        return self.net(x)


class TwoRate(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.encoder = Encoder(2, 48)
        self.head = nn.Linear(16, 3)
        self.scaler = torch.amp.GradScaler("cpu")

    def configure_optimizers(self):
        enc = torch.optim.SGD(self.encoder.parameters(), lr=0.15, momentum=0.9)
        head = torch.optim.AdamW(self.head.parameters(), lr=1e-2)
        return enc, head

    def training_step(self, batch, batch_idx):
        x, y = batch
        enc_opt, head_opt = self.optimizers(use_pl_optimizer=False)
        enc_opt.zero_grad()
        head_opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(self.head(self.encoder(x)), y)
        self.scaler.scale(loss).backward()
        for opt in (enc_opt, head_opt):
            self.scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.scaler.step(enc_opt)
        self.scaler.step(head_opt)
        self.scaler.update()
        self.log("loss", loss.detach())

    def validation_step(self, batch, batch_idx):
        x, y = batch
        out = self.head(self.encoder(x))
        self.log_dict({"val_loss": F.cross_entropy(out, y), "val_acc": (out.argmax(-1) == y).float().mean()})

    def on_validation_epoch_end(self):
        m = self.trainer.callback_metrics
        print(f"epoch {self.current_epoch} val_loss {m['val_loss']:.4f} val_acc {m['val_acc']:.3f}")


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    r = torch.rand(n, generator=g)
    a = 4.5 * r + 2.0944 * y + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([r * a.cos(), r * a.sin()], 1) * 2, y)


if __name__ == "__main__":
    L.seed_everything(10, verbose=False)
    trainer = L.Trainer(max_epochs=6, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)
    trainer.fit(TwoRate(), DataLoader(spirals(1280, 0), 64, shuffle=True), DataLoader(spirals(384, 1), 128))
