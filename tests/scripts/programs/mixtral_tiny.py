import torch
from transformers import MixtralConfig, MixtralForCausalLM

torch.manual_seed(3)
V = 20
cfg = MixtralConfig(vocab_size=V, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=1, num_local_experts=6, num_experts_per_tok=2, max_position_embeddings=32,
                    output_router_logits=True, router_aux_loss_coef=0.01, sliding_window=None)
model = MixtralForCausalLM(cfg)
opt = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
table = torch.randperm(V)

hist = []
for step in range(100):
    ids = [torch.randint(0, V, (4,))]
    for _ in range(7):
        ids.append(table[ids[-1]])
    ids = torch.stack(ids, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(input_ids=ids, labels=ids)
    opt.zero_grad()
    out.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    hist.append(out.loss.item())
    if step % 10 == 9:
        print(f"step {step + 1} loss {sum(hist[-10:]) / 10:.4f}")
