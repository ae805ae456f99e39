import torch
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

torch.manual_seed(19)
text = CLIPTextConfig(vocab_size=24, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                      max_position_embeddings=8, bos_token_id=0, eos_token_id=1, pad_token_id=1)
vision = CLIPVisionConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=8,
                          patch_size=4, num_channels=1)
model = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16))
opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
patterns = torch.randn(16, 1, 8, 8)


def batch(n=8):
    k = torch.randperm(16)[:n]
    ids = torch.stack([torch.zeros(n, dtype=torch.long), k + 4, torch.ones(n, dtype=torch.long)], 1)
    return ids, patterns[k] + 0.2 * torch.randn(n, 1, 8, 8)


hist = []
for step in range(120):
    ids, img = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(input_ids=ids, pixel_values=img, attention_mask=torch.ones_like(ids))
    sim = out.logits_per_text.float()
    gt = torch.arange(len(sim))
    loss = (torch.nn.functional.cross_entropy(sim, gt) + torch.nn.functional.cross_entropy(sim.t(), gt)) / 2
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, 4.6052)
    hist.append(loss.item())
    if step % 12 == 11:
        print(f"step {step + 1} loss {sum(hist[-12:]) / 12:.4f} scale {model.logit_scale.exp().item():.2f}")
