"""Causal LM with left padding; additive masks, bf16 autocast."""
import os, math
import torch
import torch.nn as nn
import torch.nn.functional as F

LOW = os.environ.get("PRECISION") != "fp32"
torch.manual_seed(0)
V, D, T, PAD = 26, 32, 12, 0


class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x, bias):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 4, D // 4).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) / math.sqrt(D // 4) + bias
        return self.proj((s.softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(b, t, D))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2, self.attn = nn.LayerNorm(D), nn.LayerNorm(D), Attn()
        self.mlp = nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D))

    def forward(self, x, bias):
        x = x + self.attn(self.n1(x), bias)
        return x + self.mlp(self.n2(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D, padding_idx=PAD), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(D)

    def forward(self, ids):
        t = ids.size(1)
        causal = torch.full((t, t), float("-inf")).triu(1)
        padded = torch.zeros(ids.shape).masked_fill(ids == PAD, float("-inf"))
        bias = causal[None, None] + padded[:, None, None]
        eye = torch.eye(t, dtype=torch.bool)
        bias = bias.masked_fill(eye, 0.0)              # every query keeps itself
        h = self.tok(ids) + self.pos.weight[:t]
        for b in self.blocks:
            h = b(h, bias)
        return self.norm(h) @ self.tok.weight.t()


def batch(n=16):
    start = torch.randint(1, V, (n, 1))
    stride = torch.randint(1, 4, (n, 1))
    ids = (start + stride * torch.arange(T + 1)[None] - 1) % (V - 1) + 1
    pad = torch.randint(0, 6, (n, 1))
    return torch.where(torch.arange(T + 1)[None] < pad, torch.zeros_like(ids), ids)


lm = LM()
opt = torch.optim.AdamW(lm.parameters(), lr=4e-3, betas=(.9, .95))
for step in range(80):
    ids = batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=LOW):
        logits = lm(ids[:, :-1])
    loss = F.cross_entropy(logits.float().reshape(-1, V), ids[:, 1:].reshape(-1), ignore_index=PAD)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
    opt.step()
    if step % 5 == 0 or step == 79:
        print(f"step {step} loss {loss.item():.4f}")
