import torch, lightning as L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(7, verbose=False)
g = torch.Generator().manual_seed(1)
W = torch.randn(16, 1, generator=g)
X = torch.randn(1600, 16, generator=g)
Y = (X @ W) / 4 + 0.3 * torch.sin(2 * X[:, :1]) + 0.5


class EnergyModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
        self.losses = []

    def training_step(self, batch, idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x.to(self.dtype)).float(), y.float())
        self.losses.append(loss.item())
        if self.global_step % 50 == 0:
            print(f"step {self.global_step} loss {sum(self.losses[-20:]) / len(self.losses[-20:]):.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.01)


model = EnergyModel()
trainer = L.Trainer(max_epochs=5, precision="bf16-true", accelerator="cpu", logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False)
trainer.fit(model, DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True))
with torch.no_grad():
    model = model.to(torch.float32)
    print("final mse", nn.functional.mse_loss(model.net(X), Y).item())
