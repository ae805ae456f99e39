import torch
import torch.nn as nn

torch.manual_seed(9)
PEOPLE, DIM = 10, 20
proto = torch.randn(PEOPLE, DIM)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(DIM, 48), nn.ReLU(), nn.Linear(48, 16))

    def forward(self, x):
        return self.f(x)


def pairwise(a):
    diff = a.unsqueeze(1) - a.unsqueeze(0)
    return diff.pow(2).sum(-1).sqrt()


def contrastive(emb, who, margin=2.0):
    d = pairwise(emb)
    same = (who.unsqueeze(0) == who.unsqueeze(1)).float()
    off = 1 - torch.eye(len(who))
    pos = (same * off * d.pow(2)).sum() / (same * off).sum().clamp(min=1)
    neg = ((1 - same) * (margin - d).clamp(min=0).pow(2)).sum() / (1 - same).sum()
    return pos + neg


def sample(n):
    who = torch.randint(0, PEOPLE, (n,))
    return proto[who] + 0.4 * torch.randn(n, DIM), who


enc = Encoder()
opt = torch.optim.AdamW(enc.parameters(), lr=2e-3)
for epoch in range(10):
    total = 0.0
    for _ in range(10):
        x, who = sample(24)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            emb = enc(x)
        loss = contrastive(emb.float(), who)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    print(f"epoch {epoch} contrastive {total / 10:.4f}")
