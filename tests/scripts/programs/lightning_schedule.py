import warnings; warnings.filterwarnings("ignore")
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(5)


class Forecast(L.LightningModule):
    def __init__(self, gamma=1.35):
        super().__init__()
        self.rnn = nn.GRU(4, 48, batch_first=True)
        self.fc = nn.Linear(48, 1)
        self.gamma = gamma

    def forward(self, x):
        return self.fc(self.rnn(x)[0][:, -1])

    def training_step(self, batch, i):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        if i == 0:
            print("epoch", self.current_epoch, "loss", loss.item())
        return loss

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(opt, gamma=self.gamma)}


x = torch.randn(128, 12, 4)
y = x[:, :, :1].sum(1) * 2
trainer = L.Trainer(max_epochs=24, accelerator="cpu", precision="bf16-mixed", logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Forecast(), DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))
