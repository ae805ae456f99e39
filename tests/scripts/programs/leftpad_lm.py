import math
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(40)
V, D, H, T = 96, 128, 4, 24
NEG = -6e4            # fits into half precision


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.o = nn.Linear(D, D)

    def forward(self, x, bias):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, H, D // H).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) / math.sqrt(D // H)
        s = s + bias.to(s.dtype)
        return self.o((F.softmax(s, -1) @ v).transpose(1, 2).reshape(b, t, D))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        self.att = nn.ModuleList(SelfAttention() for _ in range(2))
        self.ln = nn.ModuleList(nn.LayerNorm(D) for _ in range(3))
        self.out = nn.Linear(D, V)

    def forward(self, ids, keep):
        t = ids.size(1)
        causal = torch.full((t, t), NEG).triu(1)[None, None]
        pad = (~keep)[:, None, None, :] * NEG
        rows = (~keep)[:, None, :, None] * NEG          # padded queries attend to nothing
        bias = causal.half() + pad.half() + rows.half()
        h = self.tok(ids) + self.pos.weight[:t]
        for ln, att in zip(self.ln, self.att):
            h = h + att(ln(h), bias)
        return self.out(self.ln[2](h))


def batch(n=6):
    ids = (torch.randint(0, V, (n, 1)) + 7 * torch.arange(T)) % V
    keep = torch.arange(T)[None] >= torch.randint(0, 8, (n, 1))
    keep[0] = torch.arange(T) >= 4
    return ids.masked_fill(~keep, 0), keep


m = LM()
opt = torch.optim.Adam(m.parameters(), 1e-3)
for i in range(30):
    ids, keep = batch()
    with torch.autocast("cpu", dtype=torch.float16):
        lg = m(ids, keep)
    ok = keep[:, 1:] & keep[:, :-1]
    loss = F.cross_entropy(lg.float()[:, :-1][ok], ids[:, 1:][ok])
    opt.zero_grad(); loss.backward(); opt.step()
    if i % 6 == 0 or i == 29:
        print("iter", i, loss.item())
