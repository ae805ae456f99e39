import torch
import torch.nn as nn
import torch.nn.functional as F

MASK = -1e9


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h = heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.o = nn.Linear(dim, dim)

    def forward(self, x, causal):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.h, -1).transpose(1, 2) for z in self.qkv(x).split(c, dim=-1))
        att = (q @ k.transpose(-1, -2)).float() * (c // self.h) ** -0.5
        att = att.masked_fill(causal[:t, :t] == 0, MASK)
        y = att.softmax(-1).to(v.dtype) @ v
        return x + self.o(y.transpose(1, 2).reshape(b, t, c))


def train(loader, vocab=1000, dim=128):
    emb, block, head = nn.Embedding(vocab, dim).cuda(), Block(dim, 4).cuda(), nn.Linear(dim, vocab).cuda()
    params = [p for m in (emb, block, head) for p in m.parameters()]
    opt = torch.optim.AdamW(params, lr=3e-4)
    scaler = torch.amp.GradScaler("cuda")
    causal = torch.ones(1024, 1024, device="cuda").tril()
    for ids in loader:
        ids = ids.cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            logits = head(block(emb(ids[:, :-1]), causal))
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
