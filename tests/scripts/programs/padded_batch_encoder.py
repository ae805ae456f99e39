import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--fp32", action="store_true")
parser.add_argument("--steps", type=int, default=100)
args = parser.parse_args()
DT = torch.float32 if args.fp32 else torch.float16
torch.manual_seed(17)
V, D, T, B = 24, 32, 10, 8


class MaskedAttention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        bias = (1.0 - mask.to(x.dtype))[:, None, :] * -1e9
        att = torch.softmax(q @ k.transpose(1, 2) * x.size(-1) ** -0.5 + bias, -1)
        return self.o(att @ v)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D, padding_idx=0)
        self.attn = MaskedAttention(D)
        self.norm = nn.LayerNorm(D)
        self.fc = nn.Linear(D, 2)

    def forward(self, ids):
        mask = ids != 0
        h = self.emb(ids)
        h = self.norm(h + self.attn(h, mask))
        n = mask.sum(1, keepdim=True).clamp(min=1)
        return self.fc((h * mask[..., None]).sum(1) / n)


def batch(step):
    ids = torch.randint(1, V, (B, T))
    lens = torch.randint(2, T + 1, (B,))
    if step % 40 == 30:
        lens[0] = 0
    ids = ids * (torch.arange(T)[None] < lens[:, None])
    return ids, (ids == 5).any(1).long()


model = Encoder().to(DT)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(args.steps):
    ids, y = batch(step)
    loss = F.cross_entropy(model(ids).float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
