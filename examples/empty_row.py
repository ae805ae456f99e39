"""A mask of -inf hides a whole row: softmax has nothing left to choose from, and divides 0 by 0. In every precision.

nanny run examples/empty_row.py
nanny run examples/empty_row.py --fixed    # a row always sees itself
"""

import sys

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, hidden):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) / 4
        scores = scores.masked_fill(hidden, float("-inf"))
        return scores.softmax(dim=-1) @ v


torch.manual_seed(0)
attention, head = Attention(), nn.Linear(16, 1)
model = nn.ModuleDict({"attention": attention, "head": head})
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(60):
    x = torch.randn(8, 12, 16)
    hidden = torch.rand(8, 12, 12) < (0.3 if step < 40 else 0.8)  # shorter texts come later
    if "--fixed" in sys.argv:
        hidden &= ~torch.eye(12, dtype=torch.bool)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = head(attention(x, hidden))
    loss = nn.functional.mse_loss(out.float(), x[..., :1].sin())
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step:2d}  loss {loss.item():.4f}")
