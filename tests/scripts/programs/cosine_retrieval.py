import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--precision", default="fp16")
p.add_argument("--steps", type=int, default=120)
args = p.parse_args()
dt = {"fp16": torch.float16, "fp32": torch.float32}[args.precision]
torch.manual_seed(6)


class BagEncoder(nn.Module):
    def __init__(self, vocab=60, d=32):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, d, mode="sum", padding_idx=0)
        self.act = nn.ReLU()
        self.fc = nn.Linear(d, d, bias=False)

    def forward(self, ids):
        return F.normalize(self.fc(self.act(self.emb(ids))), dim=-1, eps=1e-12)


class Retrieval(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.doc = BagEncoder(), BagEncoder()

    def forward(self, q, d):
        return self.query(q) @ self.doc(d).t() * 8.0


def batch(step, n=16):
    topic = torch.randint(0, 6, (n,)) * 9 + 1
    q = topic[:, None] + torch.randint(0, 9, (n, 5))
    d = topic[:, None] + torch.randint(0, 9, (n, 8))
    drop = torch.rand(n) < 0.004
    q[drop] = 0
    if step == 37:
        q[3] = 0
    same = topic[:, None] == topic[None]
    return q, d, same


model = Retrieval()
model.to(dt)
opt = torch.optim.SGD(model.parameters(), lr=0.3)
for step in range(args.steps):
    q, d, same = batch(step)
    sim = model(q, d).float()
    loss = F.binary_cross_entropy_with_logits(sim, same.float())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
