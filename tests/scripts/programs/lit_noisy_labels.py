import torch, lightning as L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning.pytorch.callbacks import StochasticWeightAveraging

L.seed_everything(8, verbose=False)
X = torch.randn(1280, 10)
clean = ((X[:, 0] * X[:, 1] + X[:, 2]) > 0).long()
y = clean.clone()
flip = torch.rand(1280) < 0.2
y[flip] = 1 - y[flip]


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.ReLU(),
                                 nn.Dropout(0.3), nn.Linear(64, 2))
        self.seen = []

    def training_step(self, batch, idx):
        a, b = batch
        loss = nn.functional.cross_entropy(self.net(a).float(), b, label_smoothing=0.05)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch, idx):
        a, b = batch
        self.log("acc", (self.net(a).argmax(-1) == b).float().mean())

    def on_train_epoch_end(self):
        print(f"epoch {self.current_epoch} loss {sum(self.seen[-80:]) / 80:.4f} "
              f"clean acc {self.trainer.callback_metrics['acc'].item():.3f}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


trainer = L.Trainer(max_epochs=5, precision="bf16-mixed", accelerator="cpu", logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
                    gradient_clip_val=0.5, callbacks=[StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=3, annealing_epochs=1)])
trainer.fit(Net(), DataLoader(TensorDataset(X, y), batch_size=16, shuffle=True),
            DataLoader(TensorDataset(X, clean), batch_size=128))
