import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(1)
PAD, V, T = 0, 32, 16
cfg = LlamaConfig(vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                  num_key_value_heads=2, max_position_embeddings=32, pad_token_id=PAD, attn_implementation="eager")
model = LlamaForCausalLM(cfg)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)


def make_batch(n=8):
    ids = torch.zeros(n, T, dtype=torch.long)
    for i in range(n):
        k = int(torch.randint(8, T + 1, (1,)))
        start, stride = int(torch.randint(1, V, (1,))), int(torch.randint(1, 4, (1,)))
        ids[i, T - k:] = 1 + (start + stride * torch.arange(k)) % (V - 1)
    return ids


def attention_bias(valid, dtype):
    n, t = valid.shape
    allowed = torch.tril(torch.ones(t, t, dtype=torch.bool))[None] & valid[:, None, :]
    bias = torch.zeros(n, 1, t, t).masked_fill(~allowed[:, None], torch.finfo(torch.float32).min)
    return bias.to(dtype)


model.train()
for step in range(80):
    ids = make_batch()
    valid = ids != PAD
    labels = ids.masked_fill(~valid, -100)
    with torch.autocast("cpu", dtype=torch.float16):
        bias = attention_bias(valid, torch.get_autocast_dtype("cpu"))
        loss = model(input_ids=ids, attention_mask=bias, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 10 == 0 or step == 79:
        print(f"step {step} loss {loss.item():.4f}")
