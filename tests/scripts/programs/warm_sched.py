"""Sequence tagging transformer with bf16 autocast and a warmup schedule."""
import os
import torch
import torch.nn as nn

low = os.environ.get("PRECISION") != "fp32"
torch.manual_seed(13)


class Tagger(nn.Module):
    def __init__(self, v=20, d=32, tags=4):
        super().__init__()
        self.emb = nn.Embedding(v, d)
        self.pos = nn.Parameter(torch.randn(10, d) * .1)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(d, 4, 64, dropout=0., batch_first=True, norm_first=True) for _ in range(2)])
        self.out = nn.Linear(d, tags)

    def forward(self, ids):
        h = self.emb(ids) + self.pos
        for l in self.layers:
            h = l(h)
        return self.out(h)


WARMUP = 20


def factor(step):
    if step < WARMUP:
        return step + 1
    return (WARMUP / (step + 1)) ** 0.5


net = Tagger()
opt = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
sched = torch.optim.lr_scheduler.LambdaLR(opt, factor)
for step in range(50):
    ids = torch.randint(0, 20, (16, 10))
    tags = (ids + torch.roll(ids, 1, 1)) % 4
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        loss = nn.functional.cross_entropy(net(ids).flatten(0, 1), tags.flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    print(f"{step} loss {loss.item():.4f} lr {sched.get_last_lr()[0]:.3f}")
