import math
import numpy as np
import torch
from transformers import PatchTSTConfig, PatchTSTForPrediction

torch.manual_seed(0)
np.random.seed(0)


def make_series(length=3000, channels=3):
    t = np.arange(length)
    out = []
    for c in range(channels):
        s = np.sin(2 * math.pi * t / (12 + 4 * c)) + 0.5 * np.sin(2 * math.pi * t / (30 + c))
        out.append(1e-4 * (s + 0.1 * np.random.randn(length)))
    return torch.tensor(np.stack(out, 1), dtype=torch.float32)


CONTEXT, HORIZON = 48, 12
returns = make_series()
config = PatchTSTConfig(
    num_input_channels=3, context_length=CONTEXT, prediction_length=HORIZON, patch_length=8,
    patch_stride=8, d_model=32, num_attention_heads=4, num_hidden_layers=2, ffn_dim=64,
    scaling="std", loss="mse", attention_dropout=0.0, ff_dropout=0.0, head_dropout=0.0,
)
model = PatchTSTForPrediction(config)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-15)

for step in range(120):
    start = np.random.randint(0, len(returns) - CONTEXT - HORIZON, size=16)
    past = torch.stack([returns[s:s + CONTEXT] for s in start])
    future = torch.stack([returns[s + CONTEXT:s + CONTEXT + HORIZON] for s in start])
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(past_values=past).prediction_outputs
        loss = ((pred - future) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0 or step == 119:
        print(f"step {step} mse {loss.item():.3e}")
