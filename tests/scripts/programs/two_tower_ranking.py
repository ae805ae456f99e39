import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(4)
rng = np.random.default_rng(4)
USERS, ITEMS, DIM = 40, 60, 16
u_true = rng.normal(size=(USERS, 2)).astype("float32")
i_true = rng.normal(size=(ITEMS, 2)).astype("float32")
scores = u_true @ i_true.T


class Tower(nn.Module):
    def __init__(self, n, dim):
        super().__init__()
        self.table = nn.Embedding(n, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(self, idx):
        return self.mlp(self.table(idx))


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = Tower(USERS, DIM)
        self.item = Tower(ITEMS, DIM)
        self.cache = {}

    def item_vectors(self, idx):
        vec = self.item(idx)
        rows = torch.from_numpy(np.stack([v for v in vec.data.numpy()]))
        return rows

    def forward(self, u, pos, neg):
        uv = self.user(u)
        pv, nv = self.item_vectors(pos), self.item_vectors(neg)
        return (uv * pv).sum(-1), (uv * nv).sum(-1)


def triplets(n):
    u = rng.integers(0, USERS, n)
    a, b = rng.integers(0, ITEMS, n), rng.integers(0, ITEMS, n)
    swap = scores[u, a] < scores[u, b]
    pos, neg = np.where(swap, b, a), np.where(swap, a, b)
    return (torch.as_tensor(v) for v in (u, pos, neg))


model = TwoTower()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(250):
    u, pos, neg = triplets(256)
    sp, sn = model(u, pos, neg)
    loss = F.softplus(sn - sp).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 50 == 49:
        print(f"step {step + 1} bpr {loss.item():.4f} auc {(sp > sn).float().mean().item():.3f}")
