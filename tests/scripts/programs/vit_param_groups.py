import torch
from torch import nn
import torch.nn.functional as F


class Patchify(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.proj = nn.Conv2d(1, dim, 4, stride=4)
        self.pos_embed = nn.Parameter(torch.zeros(1, 17, dim))
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)

    def forward(self, x):
        t = self.proj(x).flatten(2).transpose(1, 2)
        t = torch.cat([self.cls_token.expand(len(t), -1, -1), t], 1)
        return t + self.pos_embed


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, dim=32, classes=4):
        super().__init__()
        self.patch = Patchify(dim)
        self.blocks = nn.Sequential(Block(dim), Block(dim))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.patch(x))[:, 0]))


def param_groups(model, wd):
    decay, no_decay = [], []
    for name, p in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            no_decay.append(p)
        elif name.endswith("weight"):
            decay.append(p)
    return [{"params": decay, "weight_decay": wd}, {"params": no_decay, "weight_decay": 0.0}]


def images(n):
    y = torch.randint(0, 4, (n,))
    x = torch.randn(n, 1, 16, 16) * 0.5
    for i, k in enumerate(y.tolist()):
        r, c = 8 * (k // 2), 8 * (k % 2)
        x[i, 0, r:r + 8, c:c + 8] += 0.8
    return x, y


def train(steps=100):
    torch.manual_seed(2)
    model = ViT()
    opt = torch.optim.AdamW(param_groups(model, 0.05), lr=1e-3, betas=(0.9, 0.95))
    for s in range(steps):
        x, y = images(24)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if s % 10 == 9:
            print("step", s + 1, "loss", round(loss.item(), 4))


train()
