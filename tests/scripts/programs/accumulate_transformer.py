import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(7)
ACCUM, MICRO, STEPS = 8, 4, 40


class Model(nn.Module):
    def __init__(self, v=30, d=32):
        super().__init__()
        self.emb = nn.Embedding(v, d)
        self.pos = nn.Parameter(torch.randn(16, d) * 0.02)
        layer = nn.TransformerEncoderLayer(d, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(d, v)

    def forward(self, ids):
        return self.out(self.enc(self.emb(ids) + self.pos))


def micro():
    ids = torch.randint(0, 30, (MICRO, 16))
    return ids, (ids * 7 + 1) % 30


model = Model()
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
sched = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, 5)
for step in range(STEPS):
    total = 0.0
    for k in range(ACCUM):
        ids, y = micro()
        loss = F.cross_entropy(model(ids).transpose(1, 2), y) / ACCUM
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    sched.step()
    opt.zero_grad()
    if step % 5 == 0:
        print(f"update {step} loss {total:.4f}")
