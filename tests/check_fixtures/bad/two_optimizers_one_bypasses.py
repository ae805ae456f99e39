"""Embedding table with SparseAdam plus a dense tower with AdamW."""
import torch
from torch import nn


class Recommender(nn.Module):
    def __init__(self, users, items, dim=64):
        super().__init__()
        self.user = nn.Embedding(users, dim, sparse=True)
        self.item = nn.Embedding(items, dim, sparse=True)
        self.tower = nn.Sequential(nn.Linear(2 * dim, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, u, i):
        return self.tower(torch.cat([self.user(u), self.item(i)], dim=-1)).squeeze(-1)


def train(model, loader):
    tables = list(model.user.parameters()) + list(model.item.parameters())
    sparse_opt = torch.optim.SparseAdam(tables, lr=1e-3)
    dense_opt = torch.optim.AdamW(model.tower.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for user, item, clicked in loader:
        sparse_opt.zero_grad()
        dense_opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            logit = model(user.cuda(), item.cuda())
            loss = nn.functional.binary_cross_entropy_with_logits(logit, clicked.cuda().float())
        scaler.scale(loss).backward()
        scaler.step(dense_opt)
        sparse_opt.step()  # expect: SCALER_STEP_BYPASSED
        scaler.update()
