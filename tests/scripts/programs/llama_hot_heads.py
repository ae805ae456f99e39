import argparse
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=20)
ap.add_argument("--qk-std", type=float, default=6.0)
args = ap.parse_args()

torch.manual_seed(3)
conf = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
                   num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64)
conf._attn_implementation = "eager"
lm = LlamaForCausalLM(conf)
with torch.no_grad():           # "wider" query/key init copied from an experiment config
    blk = lm.model.layers[1].self_attn
    blk.q_proj.weight.normal_(0, args.qk_std)
    blk.k_proj.weight.normal_(0, args.qk_std)

table = torch.randint(0, 256, (256,), generator=torch.Generator().manual_seed(1))
opt = torch.optim.AdamW(lm.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def sample():
    seq = [torch.randint(0, 256, (4, 1))]
    for _ in range(23):
        seq.append(table[seq[-1]])
    return torch.cat(seq, 1)


for it in range(args.steps):
    ids = sample()
    with torch.autocast(device_type="cpu", dtype=torch.float16):
        out = lm(input_ids=ids, labels=ids)
    opt.zero_grad(set_to_none=True)
    scaler.scale(out.loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    if it % 5 == 0 or it == args.steps - 1:
        print(it, "loss", out.loss.item(), "scale", scaler.get_scale())
