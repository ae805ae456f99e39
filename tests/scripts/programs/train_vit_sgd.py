import torch
import torch.nn.functional as F
from transformers import ViTConfig, ViTForImageClassification

torch.manual_seed(2)

NUM_CLASSES = 5
protos = torch.randn(NUM_CLASSES, 3, 16, 16)


def loader(steps, batch_size):
    for _ in range(steps):
        y = torch.randint(0, NUM_CLASSES, (batch_size,))
        yield protos[y] + 0.7 * torch.randn(batch_size, 3, 16, 16), y


model = ViTForImageClassification(ViTConfig(
    image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=64, num_labels=NUM_CLASSES, initializer_range=0.08,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=120)
scaler = torch.amp.GradScaler("cpu")

for i, (x, y) in enumerate(loader(120, 8)):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(pixel_values=x).logits
        loss = F.cross_entropy(logits, y)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    scaler.step(opt)
    scaler.update()
    sched.step()
    if i % 20 == 0 or i == 119:
        print(f"iter {i:3d} loss {loss.item():.4f} acc {(logits.argmax(-1) == y).float().mean():.2f}")
