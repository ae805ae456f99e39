import math
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(5)
TOTAL_STEPS = 120
WARMUP = 400
LR = 1e-3
BATCH = 8
LENGTH = 24

config = GPT2Config(
    vocab_size=50, n_positions=32, n_embd=32, n_layer=2, n_head=2,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
)
model = GPT2LMHeadModel(config)


def lr_factor(step):
    if step < WARMUP:
        return step // WARMUP
    progress = (step - WARMUP) / max(1, 4000 - WARMUP)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=LR
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)


def get_batch():
    start = torch.randint(0, 50, (BATCH, 1))
    stride = torch.randint(1, 4, (BATCH, 1))
    return (start + stride * torch.arange(LENGTH)) % 50


model.train()
history = []
for step in range(TOTAL_STEPS):
    ids = get_batch()
    out = model(input_ids=ids, labels=ids)
    optimizer.zero_grad()
    out.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    history.append(out.loss.item())
    if (step + 1) % 20 == 0:
        print(f"step {step + 1:4d} | loss {sum(history[-20:]) / 20:.4f}")
