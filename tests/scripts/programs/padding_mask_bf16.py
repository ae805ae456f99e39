import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(15)
V, D, T, B = 26, 32, 12, 12


class PooledEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D, padding_idx=0)
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.norm = nn.LayerNorm(D)
        self.fc = nn.Linear(D, 2)

    def forward(self, ids):
        pad = ids == 0
        h = self.emb(ids)
        s = self.q(h) @ self.k(h).transpose(1, 2) / D ** 0.5
        s = s.masked_fill(pad[:, None], torch.finfo(s.dtype).min)
        h = self.norm(h + s.softmax(-1) @ self.v(h))
        h = h.masked_fill(pad[..., None], float("-inf"))
        return self.fc(h.max(1).values)


def batch():
    ids = torch.randint(1, V, (B, T))
    lens = torch.randint(1, T + 1, (B,))
    ids = ids * (torch.arange(T)[None] < lens[:, None])
    return ids, (ids == 7).any(1).long() | (ids == 3).any(1).long()


model = PooledEncoder()
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
hist = []
for step in range(200):
    ids, y = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(ids)
    loss = F.cross_entropy(out.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    hist.append(loss.item())
    if (step + 1) % 25 == 0:
        print(f"step {step + 1} loss {sum(hist[-25:]) / 25:.4f}")
