import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class SelfAttention(nn.Module):
    def __init__(self, dim, heads=8):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, causal):
        b, n, d = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_dim)
        scores = scores.masked_fill(causal == 0, -1e9)  # expect: NUM_MASK_CONSTANT
        out = F.softmax(scores, dim=-1) @ v
        return self.proj(out.transpose(1, 2).reshape(b, n, d))


class Decoder(nn.Module):
    def __init__(self, vocab, dim=256):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.attn = SelfAttention(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        mask = torch.tril(torch.ones(ids.size(1), ids.size(1), device=ids.device))
        h = self.emb(ids)
        return self.head(h + self.attn(h, mask))


def train(loader, vocab=8000):
    net = Decoder(vocab).cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=3e-4)
    scaler = torch.amp.GradScaler("cuda")
    for ids, labels in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            logits = net(ids.cuda())
            loss = F.cross_entropy(logits.flatten(0, 1), labels.cuda().flatten())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
