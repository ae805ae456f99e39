"""BERT-style epsilon: layer_norm runs in fp32 under CUDA autocast, so 1e-12 is fine."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Embeddings(nn.Module):
    def __init__(self, vocab=30522, dim=256, max_len=512):
        super().__init__()
        self.word = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(max_len, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-12)

    def forward(self, ids):
        pos = torch.arange(ids.size(1), device=ids.device)
        return self.norm(self.word(ids) + self.pos(pos))


class Model(nn.Module):
    def __init__(self, dim=256, classes=2):
        super().__init__()
        self.emb = Embeddings(dim=dim)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.LayerNorm(dim, eps=1e-12))
        self.out = nn.Linear(dim, classes)

    def forward(self, ids):
        return self.out(self.ff(self.emb(ids))[:, 0])


def train(loader):
    net = Model().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-5, eps=1e-8)
    scaler = torch.amp.GradScaler("cuda")
    for ids, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(net(ids.cuda()), y.cuda())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
