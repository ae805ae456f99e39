import copy

import torch
from transformers import ViTConfig, ViTForImageClassification

torch.manual_seed(4)
CLASSES = 4
centers = torch.randn(CLASSES, 3, 16, 16)


def batch(n):
    y = torch.randint(0, CLASSES, (n,))
    return centers[y] + torch.randn(n, 3, 16, 16), y


class ModelEma:
    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).to(torch.bfloat16).eval()
        self.decay = decay
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.module.parameters(), model.parameters()):
            e.mul_(self.decay).add_(p.to(e.dtype), alpha=1.0 - self.decay)


model = ViTForImageClassification(ViTConfig(
    image_size=16, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=64, num_labels=CLASSES, initializer_range=0.05,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
ema = ModelEma(model, decay=0.998)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x_val, y_val = batch(64)

for step in range(200):
    x, y = batch(16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(pixel_values=x, labels=y).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update(model)
    if (step + 1) % 40 == 0:
        with torch.no_grad():
            logits = ema.module(pixel_values=x_val.bfloat16()).logits.float()
            val = torch.nn.functional.cross_entropy(logits, y_val)
            acc = (logits.argmax(-1) == y_val).float().mean()
        print(f"step {step + 1} train {loss.item():.4f} ema val loss {val:.4f} ema val acc {acc:.3f}")
