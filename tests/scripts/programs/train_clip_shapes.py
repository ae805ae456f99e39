import torch
from transformers import CLIPConfig, CLIPModel

torch.manual_seed(7)

text_config = dict(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                   num_attention_heads=4, max_position_embeddings=8, projection_dim=32,
                   eos_token_id=31, bos_token_id=30, pad_token_id=29)
vision_config = dict(image_size=16, patch_size=8, hidden_size=32, intermediate_size=64,
                     num_hidden_layers=2, num_attention_heads=4, projection_dim=32)
similarity_scale = 100.0
config = CLIPConfig(text_config=text_config, vision_config=vision_config,
                    projection_dim=32, logit_scale_init_value=similarity_scale)
model = CLIPModel(config)

CLASSES = 24
prototypes = torch.randn(CLASSES, 3, 16, 16)
captions = torch.randint(0, 29, (CLASSES, 6))
captions = torch.cat([torch.full((CLASSES, 1), 30), captions, torch.full((CLASSES, 1), 31)], dim=1)

decay, no_decay = [], []
for name, p in model.named_parameters():
    (no_decay if p.ndim < 2 else decay).append(p)
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.05}, {"params": no_decay, "weight_decay": 0.0}], lr=1e-3)

running = None
for step in range(100):
    idx = torch.randperm(CLASSES)[:12]
    images = prototypes[idx] + 0.3 * torch.randn(12, 3, 16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(input_ids=captions[idx], pixel_values=images, return_loss=True)
    optimizer.zero_grad()
    out.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    acc = (out.logits_per_image.argmax(1) == torch.arange(12)).float().mean().item()
    running = acc if running is None else 0.9 * running + 0.1 * acc
    if step % 25 == 0 or step == 99:
        print(f"step {step:3d}  loss {out.loss.item():.3f}  acc {running:.3f}")
