"""Mixed precision training through a decorator."""
import torch
from torch import nn


class Config:
    steps = 120
    lr = 1e-3
    dtype = torch.bfloat16


class TinyViT(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, 4, stride=4)
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 2)

    def forward(self, x):
        t = self.patch(x).flatten(2).transpose(1, 2)
        t = self.norm(t + self.attn(t, t, t, need_weights=False)[0])
        return self.head(t.mean(1))


class MixedPrecisionTrainer:
    def __init__(self, model, cfg):
        self.model, self.cfg = model, cfg
        self.opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
        self.loss_fn = nn.CrossEntropyLoss()

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def get_batch(self):
        x = torch.randn(16, 1, 8, 8)
        y = torch.randint(0, 2, (16,))
        x[y == 1, :, :4, :4] += 1.0
        return x, y

    def training_step(self, x, y):
        return self.loss_fn(self.model(x), y)

    def fit(self):
        for _ in range(self.cfg.steps):
            x, y = self.get_batch()
            loss = self.training_step(x, y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
        return loss.item()


torch.manual_seed(123)
print("loss", MixedPrecisionTrainer(TinyViT(), Config()).fit())
