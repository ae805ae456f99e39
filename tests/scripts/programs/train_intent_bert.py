import torch
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(0)
cfg = BertConfig(vocab_size=120, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                 intermediate_size=64, max_position_embeddings=32, num_labels=4,
                 hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
model = BertForSequenceClassification(cfg).half()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(n=8, length=12):
    labels = torch.randint(0, 4, (n,))
    ids = torch.randint(20, 120, (n, length))
    pos = torch.randint(1, length, (n, 3))
    ids.scatter_(1, pos, (labels[:, None] * 4 + torch.randint(0, 4, (n, 3))))
    ids[:, 0] = 19
    return ids, labels


model.train()
for step in range(80):
    ids, labels = batch()
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)
    optimizer.zero_grad()
    out.loss.backward()
    optimizer.step()
    if step % 10 == 0 or step == 79:
        print(f"step {step} loss {out.loss.item():.4f}")
