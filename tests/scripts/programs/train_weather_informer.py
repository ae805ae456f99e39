import numpy as np
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

torch.manual_seed(0)
rng = np.random.default_rng(3)

t = np.arange(4000)
kelvin = 288.0 + 3.0 * np.sin(2 * np.pi * t / 24) + 1.5 * np.sin(2 * np.pi * t / 60) + 0.1 * rng.standard_normal(4000)
kelvin = torch.tensor(kelvin, dtype=torch.float32)


class WindowNorm(nn.Module):
    def forward(self, x):
        x = x.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else x
        mean = x.mean(dim=1, keepdim=True)
        var = (x * x).mean(dim=1, keepdim=True) - mean * mean
        std = var.clamp(min=0.0).add(1e-2).sqrt()
        return (x - mean) / std, mean, std


class Forecaster(nn.Module):
    def __init__(self, dim=32, patch=6, horizon=6):
        super().__init__()
        self.patch = patch
        self.norm = WindowNorm()
        self.embed = nn.Linear(patch, dim)
        self.body = GPT2Model(GPT2Config(vocab_size=1, n_positions=16, n_embd=dim, n_layer=2, n_head=4,
                                         resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        self.head = nn.Linear(dim, horizon)

    def forward(self, past):
        x, mean, std = self.norm(past)
        x = x.view(x.shape[0], -1, self.patch)
        h = self.body(inputs_embeds=self.embed(x)).last_hidden_state[:, -1]
        return self.head(h), mean, std


model = Forecaster()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
hist = []
for step in range(160):
    s = rng.integers(0, 4000 - 60, size=16)
    past = torch.stack([kelvin[i:i + 48] for i in s])
    future = torch.stack([kelvin[i + 48:i + 54] for i in s])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred, mean, std = model(past)
    forecast = pred.float() * std.float() + mean.float()
    loss = nn.functional.l1_loss(forecast, future)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    hist.append(loss.item())
    if (step + 1) % 20 == 0:
        print(f"step {step + 1} mae {np.mean(hist[-20:]):.4f} K")
