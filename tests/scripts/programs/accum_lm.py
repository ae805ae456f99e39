"""Small causal conv LM, micro-batching, keeps gradients until an update went through."""
import os, torch
import torch.nn as nn
import torch.nn.functional as F

fp16 = os.environ.get("PRECISION", "fp16") == "fp16"
torch.manual_seed(12)
V = 24

class CausalConv(nn.Module):
    def __init__(self, c, k=3):
        super().__init__()
        self.k = k
        self.conv = nn.Conv1d(c, 2 * c, k)
        self.norm = nn.LayerNorm(c)
    def forward(self, x):
        h = self.norm(x).transpose(1, 2)
        a, b = self.conv(F.pad(h, (self.k - 1, 0))).chunk(2, 1)
        return x + (a * torch.sigmoid(b)).transpose(1, 2)

class LM(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(V, d)
        self.l1, self.l2 = CausalConv(d), CausalConv(d)
        self.head = nn.Linear(d, V)
    def forward(self, ids):
        return self.head(self.l2(self.l1(self.emb(ids))))

def seqs(n, T=12):
    s = torch.randint(0, V, (n, 2))
    for t in range(T - 1):
        nxt = (s[:, -1] + 2 * s[:, -2] + 1) % V
        s = torch.cat([s, nxt[:, None]], 1)
    return s

lm = LM()
opt = torch.optim.Adam(lm.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 15, growth_interval=6, enabled=fp16)
updates = 0
for step in range(70):
    total = 0.0
    for micro in range(2):
        ids = seqs(8)
        with torch.autocast("cpu", torch.float16, enabled=fp16):
            out = lm(ids[:, :-1])
            loss = F.cross_entropy(out.reshape(-1, V), ids[:, 1:].reshape(-1)) / 2
        scaler.scale(loss).backward()
        total += loss.item()
    before = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if scaler.get_scale() >= before:        # update accepted
        opt.zero_grad()
        updates += 1
    print(f"{step} loss {total:.4f} updates {updates} scale {scaler.get_scale():g}")
