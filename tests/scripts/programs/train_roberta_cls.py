import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import RobertaConfig, RobertaForSequenceClassification, get_linear_schedule_with_warmup

torch.manual_seed(8)
cfg = RobertaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
                    max_position_embeddings=40, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
model = RobertaForSequenceClassification(cfg)

ids = torch.randint(4, 64, (480, 16))
labels = ((ids < 30).sum(1) > 6).long()
loader = DataLoader(TensorDataset(ids, labels), batch_size=16, shuffle=True)

epochs = 5
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=epochs)

for epoch in range(epochs):
    seen, correct, total = 0, 0, 0.0
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(input_ids=x, attention_mask=torch.ones_like(x), labels=y)
        optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        total += out.loss.item() * len(y)
        correct += (out.logits.argmax(-1) == y).sum().item()
        seen += len(y)
    print(f"epoch {epoch} loss {total / seen:.4f} acc {correct / seen:.3f}")
