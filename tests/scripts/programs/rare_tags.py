"""Tag-bag classifier: sparse embedding table, Zipf tags, two optimizers."""
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

low = os.environ.get("PRECISION") != "fp32"
torch.manual_seed(60)
NTAG = 2000
zipf = 1.0 / torch.arange(1, NTAG + 1).float() ** 1.05
owner = torch.randint(0, 5, (NTAG,))


def bags(n=24, k=10):
    y = torch.randint(0, 5, (n,))
    p = zipf[None] * torch.where(owner[None] == y[:, None], 3.0, 0.7)
    return torch.multinomial(p, k), y


table = nn.EmbeddingBag(NTAG, 24, mode="mean", sparse=True)
head = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 5))
opt_table = torch.optim.SparseAdam(table.parameters(), lr=1e-2)
opt_head = torch.optim.AdamW(head.parameters(), lr=5e-3)
avg = 0.
for step in range(120):
    ids, y = bags()
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        loss = F.cross_entropy(head(table(ids)), y)
    opt_table.zero_grad()
    opt_head.zero_grad()
    loss.backward()
    opt_table.step()
    opt_head.step()
    avg = loss.item() if step == 0 else .9 * avg + .1 * loss.item()
    if step % 12 == 11:
        print(f"step {step} loss {avg:.4f}")
