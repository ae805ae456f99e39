import math
import torch
from transformers import ViTConfig, ViTForImageClassification

torch.manual_seed(0)
cfg = ViTConfig(image_size=16, patch_size=4, num_channels=1, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                intermediate_size=64, num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
model = ViTForImageClassification(cfg)
for p in model.vit.embeddings.patch_embeddings.parameters():
    p.requires_grad_(False)
trainable = [p for p in model.parameters() if p.requires_grad]
opt = torch.optim.AdamW(trainable, lr=3e-3, weight_decay=0.01)
steps = 150
sched = torch.optim.lr_scheduler.LambdaLR(
    opt, lambda s: s / 15 if s < 15 else 0.5 * (1 + math.cos(math.pi * (s - 15) / (steps - 15))))
yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")


def batch(n=16):
    y = torch.randint(0, 4, (n,))
    a = y.float()[:, None, None] * math.pi / 4
    ph = torch.rand(n, 1, 1) * 6.28
    img = torch.sin((xx * torch.cos(a) + yy * torch.sin(a)) * 1.2 + ph) + 0.1 * torch.randn(n, 16, 16)
    return img[:, None], y


hist = []
for step in range(steps):
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(pixel_values=x)
        loss = torch.nn.functional.cross_entropy(out.logits.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    hist.append(loss.item())
    if step % 15 == 14:
        print(f"step {step + 1} loss {sum(hist[-15:]) / 15:.4f} lr {sched.get_last_lr()[0]:.5f}")
