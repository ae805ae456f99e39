import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim, dtype=torch.bfloat16)  # expect: HALF_NORM
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, dim=256, depth=4, vocab=1000):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.Sequential(*[Block(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids)))


def train(loader):
    model = Stack().cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for ids, labels in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(ids.cuda())
            loss = F.cross_entropy(logits.flatten(0, 1), labels.cuda().flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
