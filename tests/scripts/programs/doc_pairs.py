"""Two-view contrastive training on bag-of-words documents (InfoNCE)."""
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

half = os.getenv("PRECISION", "half") != "fp32"
torch.manual_seed(21)
VOCAB, TOPICS = 60, 8
topic_word = torch.distributions.Dirichlet(torch.full((VOCAB,), .08)).sample((TOPICS,))


def unit(v):
    return v / (v.norm(dim=1, keepdim=True) + 1e-8)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(VOCAB, 48, bias=False)
        self.fc2 = nn.Linear(48, 24, bias=False)

    def forward(self, bow):
        return unit(F.relu(self.fc2(F.relu(self.fc1(bow)))))


def sample_views(n, step):
    t = torch.randint(0, TOPICS, (n,))
    views = []
    for _ in range(2):
        counts = torch.zeros(n, VOCAB)
        words = torch.multinomial(topic_word[t], 12, replacement=True)
        counts.scatter_add_(1, words, torch.ones(n, 12))
        if step >= 15:                        # stop-word filter switched on after burn-in
            counts[:, :40] *= (torch.rand(n, 40) > .5).float()
            counts *= (torch.rand(n, 1) > .08).float()
        views.append(torch.log1p(counts))
    return views


enc = Encoder()
opt = torch.optim.Adam(enc.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=512, enabled=half)
for step in range(100):
    a, b = sample_views(16, step)
    with torch.autocast("cpu", torch.float16, enabled=half):
        za, zb = enc(a), enc(b)
        sim = za @ zb.t() * 5.0
        loss = F.cross_entropy(sim, torch.arange(16))
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print("step %d  loss %.4f  scale %g" % (step, loss.item(), scaler.get_scale()))
