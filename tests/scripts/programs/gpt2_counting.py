import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(13)
V = 32
cfg = GPT2Config(vocab_size=V, n_positions=24, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
                 resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
model = GPT2LMHeadModel(cfg)
model.gradient_checkpointing_enable()
model.config.use_cache = False
model.train()
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 24, growth_interval=50)

hist = []
for step in range(100):
    start = torch.randint(0, V, (8, 1))
    stride = torch.randint(1, 3, (8, 1))
    ids = (start + stride * torch.arange(16)) % V
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(input_ids=ids, labels=ids).loss
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    hist.append(loss.item())
    if step % 10 == 9:
        print(f"step {step + 1} loss {sum(hist[-10:]) / 10:.4f} scale {scaler.get_scale():.0f}")
