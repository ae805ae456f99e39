import torch
from transformers import DistilBertConfig, DistilBertForTokenClassification

torch.manual_seed(6)
cfg = DistilBertConfig(vocab_size=60, dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=32,
                       num_labels=3, dropout=0.0, attention_dropout=0.0)
model = DistilBertForTokenClassification(cfg)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
tag_of = torch.randint(0, 3, (60,))


def get_batch():
    ids = torch.randint(0, 60, (8, 12))
    return ids, tag_of[ids]


total = 0.0
for step in range(100):
    ids, tags = get_batch()
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(input_ids=ids, labels=tags).loss
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    total += loss.item()
    if step % 10 == 9:
        print(f"step {step + 1} loss {total / 10:.4f} scale {scaler.get_scale():.0f}")
        total = 0.0
