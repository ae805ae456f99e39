"""MoCo-style contrastive learning: momentum encoder, queue of negatives, temperature 0.02."""
import os, copy
import torch
import torch.nn as nn
import torch.nn.functional as F

amp = os.environ.get("PRECISION") != "fp32"
torch.manual_seed(27)


class Enc(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(20, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 16))

    def forward(self, x):
        return F.normalize(self.f(x).float(), dim=1)


q_enc = Enc()
k_enc = copy.deepcopy(q_enc).requires_grad_(False)
queue = F.normalize(torch.randn(128, 16), dim=1)
opt = torch.optim.SGD(q_enc.parameters(), lr=.05, momentum=.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu", enabled=amp)
proto = torch.randn(12, 20) * 2
ptr, mean = 0, None
for step in range(100):
    y = torch.randint(0, 12, (16,))
    base = proto[y] + .8 * torch.randn(16, 20)
    a, b = base + .3 * torch.randn(16, 20), base + .3 * torch.randn(16, 20)
    with torch.autocast("cpu", torch.float16, enabled=amp):
        q = q_enc(a)
        with torch.no_grad():
            for pk, pq in zip(k_enc.parameters(), q_enc.parameters()):
                pk.mul_(.98).add_(pq, alpha=.02)
            k = k_enc(b)
    pos = (q * k).sum(1, keepdim=True)
    neg = q @ queue.t()
    logits = torch.cat([pos, neg], 1) / 0.02            # within +-50, fp32
    loss = F.cross_entropy(logits, torch.zeros(16, dtype=torch.long))
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(q_enc.parameters(), 2.0)
    scaler.step(opt)
    scaler.update()
    queue[ptr:ptr + 16] = k
    ptr = (ptr + 16) % 128
    mean = loss.item() if mean is None else .9 * mean + .1 * loss.item()
    if step % 10 == 9:
        print(f"{step} nce {mean:.4f} max |logit| {logits.abs().max().item():.1f} scale {scaler.get_scale():g}")
