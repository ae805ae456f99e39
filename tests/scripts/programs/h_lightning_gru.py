import warnings; warnings.filterwarnings("ignore")
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(15)


class Load(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 64, batch_first=True)
        self.fc = nn.Linear(64, 1)

    def forward(self, x):
        return self.fc(self.rnn(x)[0][:, -1])

    def training_step(self, b, i):
        return nn.functional.huber_loss(self(b[0]), b[1])

    def validation_step(self, b, i):
        print("val", nn.functional.huber_loss(self(b[0]), b[1]).item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


t = torch.arange(800.0)
s = torch.stack([torch.sin(t / 5), torch.cos(t / 9), torch.sin(t / 23)], 1) + 0.05 * torch.randn(800, 3)
X = torch.stack([s[i:i + 12] for i in range(700)])
Y = torch.stack([s[i + 12, :1] for i in range(700)])
L.Trainer(max_epochs=3, accelerator="cpu", precision="bf16-mixed", logger=False, enable_checkpointing=False,
          enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0).fit(
    Load(), DataLoader(TensorDataset(X[:512], Y[:512]), 32, shuffle=True), DataLoader(TensorDataset(X[512:640], Y[512:640]), 64))
