"""Caption tokens cross-attend to detected regions (0..6 per image), next-token loss."""
import os
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

AMP = os.environ.get("PRECISION", "amp") != "fp32"
torch.manual_seed(17)
V, D, R, T = 30, 32, 6, 8


class RegionAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x, regions, present):
        q = self.q(x).view(-1, T, 2, D // 2).transpose(1, 2)
        k = self.k(regions).view(-1, R, 2, D // 2).transpose(1, 2)
        v = self.v(regions).view(-1, R, 2, D // 2).transpose(1, 2)
        s = q @ k.transpose(-1, -2) / math.sqrt(D // 2)
        bias = (1.0 - present.to(s.dtype))[:, None, None, :] * -1e5
        w = F.softmax(s + bias, dim=-1)
        return self.o((w @ v).transpose(1, 2).reshape(-1, T, D))


class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(V, D)
        self.rnn = nn.GRU(D, D, batch_first=True)
        self.reg = nn.Linear(10, D)
        self.att = RegionAttention()
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, V)

    def forward(self, ids, feats, present):
        h, _ = self.rnn(self.tok(ids))
        h = self.norm(h + self.att(h, self.reg(feats), present))
        return self.head(h)


def sample(n, step):
    cls = torch.randint(0, 10, (n, R))
    count = torch.randint(1, R + 1, (n,))
    if step > 20:                                   # second shard: also images without detections
        count[torch.rand(n) < .1] = 0
    present = torch.arange(R)[None] < count[:, None]
    feats = F.one_hot(cls, 10).float() * present[..., None]
    ids = torch.zeros(n, T + 1, dtype=torch.long)
    for t in range(1, T + 1):
        j = torch.minimum(torch.full((n,), (t - 1) % R), (count - 1).clamp(min=0))
        c = cls.gather(1, j[:, None])[:, 0]
        ids[:, t] = torch.where(count > 0, 5 + c, torch.full_like(c, 4))
    return ids, feats, present


net = Captioner()
opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", enabled=AMP)
sched = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, 10)
for step in range(80):
    ids, feats, present = sample(16, step)
    with torch.autocast("cpu", torch.float16, enabled=AMP):
        logits = net(ids[:, :-1], feats, present)
        loss = F.cross_entropy(logits.reshape(-1, V), ids[:, 1:].reshape(-1))
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    sched.step()
    print(f"{step}: {loss.item():.4f} scale={scaler.get_scale():g}")
