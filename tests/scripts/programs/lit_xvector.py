import torch, lightning as L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(21, verbose=False)
N_SPK = 6
g = torch.Generator().manual_seed(2)
centers = torch.randn(N_SPK, 20, generator=g)
spk = torch.randint(0, N_SPK, (960,), generator=g)
frames = 4.0 + centers[spk][:, None, :] + 0.3 * torch.randn(960, 30, 20, generator=g)


class StatsPool(nn.Module):
    def forward(self, h):
        mean = h.mean(1)
        var = (h * h).mean(1) - mean * mean
        return torch.cat([mean, var.sqrt()], -1)


class XVector(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.frame = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 32))
        self.pool = StatsPool()
        self.cls = nn.Linear(64, N_SPK)
        self.hist = []

    def training_step(self, batch, idx):
        x, y = batch
        logits = self.cls(self.pool(self.frame(x)))
        loss = nn.functional.cross_entropy(logits.float(), y)
        self.hist.append(loss.item())
        if idx % 15 == 0:
            print(f"step {self.global_step} loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


trainer = L.Trainer(max_epochs=2, precision="bf16-mixed", accelerator="cpu", logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False)
model = XVector()
trainer.fit(model, DataLoader(TensorDataset(frames, spk), batch_size=16, shuffle=True))
print("last losses", [round(v, 4) for v in model.hist[-3:]])
