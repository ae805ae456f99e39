import math
import torch
import torch.nn as nn
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base = base
        nin, nout = base.weight.shape
        self.A = nn.Parameter(torch.randn(nin, r) / math.sqrt(nin))
        self.B = nn.Parameter(torch.zeros(r, nout))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + (x @ self.A @ self.B) * self.scale


def batch(stride, n=12, t=20):
    start = torch.randint(0, 40, (n, 1))
    return (start + stride * torch.arange(t)) % 40


def fit(model, params, stride, steps, lr, tag):
    opt = torch.optim.AdamW(params, lr=lr, weight_decay=0.0)
    for i in range(steps):
        ids = batch(stride)
        loss = model(input_ids=ids, labels=ids).loss
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i % 20 == 0 or i == steps - 1:
            print(f"{tag} step {i} loss {loss.item():.4f}")


cfg = GPT2Config(vocab_size=40, n_positions=24, n_embd=32, n_layer=2, n_head=2,
                 resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(cfg)
fit(model, model.parameters(), 1, 60, 3e-3, "base")
for p in model.parameters():
    p.requires_grad = False
for block in model.transformer.h:
    block.attn.c_attn = LoRALinear(block.attn.c_attn)
    block.mlp.c_fc = LoRALinear(block.mlp.c_fc)
trainable = [p for p in model.parameters() if p.requires_grad]
print("trainable", sum(p.numel() for p in trainable))
fit(model, trainable, 3, 100, 1e-2, "lora")
