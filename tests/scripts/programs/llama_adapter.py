import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(7)
PAD, V, T = 0, 24, 14
cfg = LlamaConfig(vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                  num_key_value_heads=1, max_position_embeddings=32, pad_token_id=PAD, initializer_range=0.1)
model = LlamaForCausalLM(cfg)


class LoRA(nn.Module):
    def __init__(self, base, r=8):
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, r, bias=False)
        self.b = nn.Linear(r, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + 2.0 * self.b(self.a(x))


for p in model.parameters():
    p.requires_grad_(False)
for layer in model.model.layers:
    for name in ("q_proj", "v_proj", "o_proj"):
        setattr(layer.self_attn, name, LoRA(getattr(layer.self_attn, name)))
    for name in ("up_proj", "down_proj"):
        setattr(layer.mlp, name, LoRA(getattr(layer.mlp, name)))
model.lm_head.weight.requires_grad_(True)
params = [p for p in model.parameters() if p.requires_grad]
opt = torch.optim.AdamW(params, lr=1e-2)


def batch(n=8):
    ids = torch.zeros(n, T, dtype=torch.long)
    for i in range(n):
        k = int(torch.randint(8, T + 1, (1,)))
        ids[i, T - k:] = 1 + (int(torch.randint(0, V, (1,))) + 5 * torch.arange(k)) % (V - 1)
    return ids


hist = []
for step in range(100):
    ids = batch()
    mask = (ids != PAD).long()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(params, 1.0)
    opt.step()
    hist.append(loss.item())
    if step % 10 == 9:
        print(f"step {step + 1} loss {sum(hist[-10:]) / 10:.4f}")
