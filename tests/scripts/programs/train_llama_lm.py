import random

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

random.seed(0)
np.random.seed(0)
torch.manual_seed(0)

VOCAB = 96
SEQ = 24


def sample_batch(rng, batch_size):
    start = rng.integers(0, 60, size=(batch_size, 1))
    stride = rng.integers(1, 5, size=(batch_size, 1))
    seq = (start + stride * np.arange(SEQ)) % 80
    return torch.from_numpy(seq).long()


config = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
model = LlamaForCausalLM(config).half()
model.train()

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
scheduler = get_cosine_schedule_with_warmup(optimizer, 10, 100)
rng = np.random.default_rng(0)

for step in range(100):
    ids = sample_batch(rng, 8)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == 99:
        print(f"step {step} loss {out.loss.item():.4f}")
