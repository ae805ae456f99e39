import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import RobertaConfig, RobertaForTokenClassification, get_linear_schedule_with_warmup

torch.manual_seed(27)
acc = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=True)
x = torch.randint(5, 90, (320, 16))
y = (x + x.roll(1, 1)) % 3
dl = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = RobertaForTokenClassification(RobertaConfig(
    vocab_size=90, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=24, num_labels=3))
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
sched = get_linear_schedule_with_warmup(opt, 4, 60)
model, opt, dl, sched = acc.prepare(model, opt, dl, sched)
n = 0
for epoch in range(2):
    for bx, by in dl:
        with acc.accumulate(model):
            loss = model(input_ids=bx, labels=by).loss
            acc.backward(loss)
            if acc.sync_gradients:
                acc.clip_grad_norm_(model.parameters(), 1.0)
            opt.step(); sched.step(); opt.zero_grad()
        n += 1
        if n % 16 == 0:
            acc.print(n, loss.item())
