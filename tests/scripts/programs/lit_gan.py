import torch, lightning as L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(5, verbose=False)
real = torch.randn(2400, 2) * torch.tensor([0.5, 0.2]) + torch.tensor([2.0, -1.0])


class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.G = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
        self.D = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def configure_optimizers(self):
        return (torch.optim.Adam(self.G.parameters(), lr=4e-3, betas=(0.5, 0.9)),
                torch.optim.Adam(self.D.parameters(), lr=4e-3, betas=(0.5, 0.9)))

    def training_step(self, batch, idx):
        (x,) = batch
        og, od = self.optimizers()
        fake = self.G(torch.randn(len(x), 4))
        self.toggle_optimizer(od)
        ld = nn.functional.softplus(-self.D(x).float()).mean() + nn.functional.softplus(self.D(fake.detach()).float()).mean()
        od.zero_grad()
        self.manual_backward(ld)
        od.step()
        self.untoggle_optimizer(od)
        self.toggle_optimizer(og)
        fake = self.G(torch.randn(len(x), 4))
        lg = nn.functional.softplus(-self.D(fake).float()).mean()
        og.zero_grad()
        self.manual_backward(lg)
        og.step()
        self.untoggle_optimizer(og)
        if idx % 15 == 0:
            with torch.no_grad():
                gap = (self.G(torch.randn(256, 4)).float().mean(0) - torch.tensor([2.0, -1.0])).norm().item()
            print(f"step {idx} d {ld.item():.3f} g {lg.item():.3f} gap {gap:.3f}")


trainer = L.Trainer(max_epochs=1, precision="bf16-mixed", accelerator="cpu", logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False)
model = GAN()
trainer.fit(model, DataLoader(TensorDataset(real), batch_size=16, shuffle=True))
with torch.no_grad():
    s = model.G(torch.randn(2000, 4))
print("final mean", s.mean(0).tolist(), "std", s.std(0).tolist())
