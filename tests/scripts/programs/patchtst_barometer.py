"""Forecasting station air pressure (Pa) with PatchTST; training with Accelerate."""
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import PatchTSTConfig, PatchTSTForPrediction

set_seed(19)
CTX, PRED = 48, 8


def stations(n, g):
    t = torch.arange(CTX + PRED).float()
    base = 101325.0 + 400.0 * torch.randn(n, 1, generator=g)
    period = 12 + 4 * torch.rand(n, 1, generator=g)
    phase = 6.2832 * torch.rand(n, 1, generator=g)
    amp = 60 + 60 * torch.rand(n, 1, generator=g)
    tide = amp * torch.sin(2 * math.pi * t / period + phase)
    return base + tide + 4.0 * torch.randn(n, CTX + PRED, generator=g)


accelerator = Accelerator(cpu=True, mixed_precision="bf16")
g = torch.Generator().manual_seed(4)
series = stations(2000, g).to(torch.bfloat16)
held_out = stations(64, g)
past, future = series[:, :CTX, None], series[:, CTX:, None]

cfg = PatchTSTConfig(
    num_input_channels=1, context_length=CTX, prediction_length=PRED, patch_length=8, patch_stride=8, d_model=32,
    num_hidden_layers=2, num_attention_heads=2, ffn_dim=64, scaling=None, loss="mse", dropout=0.0, attention_dropout=0.0,
    head_dropout=0.0, norm_type="layernorm", use_cls_token=False,
)
model = PatchTSTForPrediction(cfg)
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
loader = DataLoader(TensorDataset(past, future), batch_size=10, shuffle=True)
model, opt, loader = accelerator.prepare(model, opt, loader)

step, run = 0, None
for epoch in range(1):
    for x, y in loader:
        mu = x.float().mean(1, keepdim=True)
        sd = x.float().std(1, keepdim=True) + 1.0
        out = model(past_values=(x.float() - mu) / sd, future_values=(y.float() - mu) / sd)
        accelerator.backward(out.loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        run = out.loss.item() if run is None else 0.9 * run + 0.1 * out.loss.item()
        if step % 20 == 0:
            accelerator.print(f"step {step} loss {run:.4f}")
        step += 1

model.eval()
with torch.no_grad():
    x, y = held_out[:, :CTX, None], held_out[:, CTX:, None]
    mu, sd = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1.0
    pred = model(past_values=(x - mu) / sd).prediction_outputs.float() * sd + mu
rmse = (pred - y).pow(2).mean().sqrt().item()
naive = (mu - y).pow(2).mean().sqrt().item()
accelerator.print(f"final loss {run:.4f}  held-out rmse {rmse:.1f} Pa (climatology {naive:.1f} Pa)")
