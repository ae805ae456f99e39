import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

set_seed(0)
accelerator = Accelerator(mixed_precision="bf16", cpu=True)

config = GPT2Config(vocab_size=82, n_positions=24, n_embd=32, n_layer=2, n_head=4,
                    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
scheduler = get_linear_schedule_with_warmup(optimizer, 10, 200)

g = torch.Generator().manual_seed(1)
data = []
for _ in range(400):
    start = int(torch.randint(0, 82, (1,), generator=g))
    data.append((start + 7 * torch.arange(16)) % 82)
loader = DataLoader(torch.stack(data), batch_size=8, shuffle=True)

model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
model.train()
step = 0
for epoch in range(2):
    for ids in loader:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.zero_grad()
        optimizer.step()
        scheduler.step()
        step += 1
        if step % 20 == 0:
            accelerator.print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
