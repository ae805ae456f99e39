"""Tiny T5 that learns to reverse strings; second decoder-side FFN comes from an 'outlier' checkpoint."""
import torch
from transformers import T5Config, T5ForConditionalGeneration


def build():
    torch.manual_seed(21)
    config = T5Config(vocab_size=64, d_model=128, d_kv=16, d_ff=256, num_layers=2, num_heads=4,
                      feed_forward_proj="gated-gelu", dropout_rate=0.0, decoder_start_token_id=0,
                      pad_token_id=0)
    model = T5ForConditionalGeneration(config)
    with torch.no_grad():
        model.encoder.block[1].layer[1].layer_norm.weight.fill_(180.0)
        model.encoder.block[1].layer[1].DenseReluDense.wo.weight.mul_(1e-4)
    return model


def make_batch(n=8, length=12):
    src = torch.randint(2, 64, (n, length))
    return src, src.flip(1)


model = build()
amp_dtype = torch.bfloat16
optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
model.train()
for step in range(20):
    src, tgt = make_batch()
    with torch.autocast("cpu", dtype=amp_dtype):
        loss = model(input_ids=src, labels=tgt).loss
    scaler.scale(loss).backward()
    scaler.step(optim)
    scaler.update()
    optim.zero_grad()
    if step % 5 == 0 or step == 19:
        print(f"{step:3d} {loss.item():.4f}")
