import torch
from torch import nn
from transformers import ElectraConfig, ElectraForSequenceClassification

torch.manual_seed(0)


def init_weights(module):
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)


model = ElectraForSequenceClassification(ElectraConfig(
    vocab_size=60, embedding_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=64, max_position_embeddings=16, num_labels=3,
    hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1))
model.apply(init_weights)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

total = 0.0
for step in range(1, 121):
    y = torch.randint(0, 3, (16,))
    x = torch.randint(30, 60, (16, 12))
    x[:, :3] = torch.randint(0, 10, (16, 3)) + 10 * y[:, None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=x, labels=y).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.item()
    if step % 20 == 0:
        print(f"step {step} loss {total / 20:.4f}")
        total = 0.0
