import torch
from transformers import T5Config, T5ForConditionalGeneration, set_seed

set_seed(0)

config = T5Config(
    vocab_size=40, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2,
    num_heads=4, feed_forward_proj="gated-gelu", dropout_rate=0.0,
    decoder_start_token_id=0, pad_token_id=0, tie_word_embeddings=False,
    initializer_factor=8.0,
)
model = T5ForConditionalGeneration(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0.0)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

for step in range(120):
    src = torch.randint(2, 40, (16, 8))
    tgt = src[:, :4].flip(1)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(input_ids=src, labels=tgt).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if step % 20 == 0 or step == 119:
        print(f"{step:4d} loss={loss.item():.4f} scale={scaler.get_scale():g}")
