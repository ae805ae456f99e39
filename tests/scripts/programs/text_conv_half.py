import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F

a = argparse.ArgumentParser()
a.add_argument("--dtype", default="float16")
a.add_argument("--lr", type=float, default=5e-3)
a.add_argument("--steps", type=int, default=100)
args = a.parse_args()
torch.manual_seed(22)
dt = getattr(torch, args.dtype)


class TextCNN(nn.Module):
    def __init__(self, v=50, d=24):
        super().__init__()
        self.emb = nn.Embedding(v, d)
        self.conv = nn.Linear(3 * d, 32)
        self.out = nn.Linear(32, 3)

    def forward(self, ids):
        e = self.emb(ids)
        win = torch.cat([e[:, :-2], e[:, 1:-1], e[:, 2:]], -1)
        return self.out(torch.relu(self.conv(win)).mean(1))


def batch(n=16):
    ids = torch.randint(0, 50, (n, 10))
    return ids, ((ids < 25).sum(1).clamp(3, 7) - 3) // 2


model = TextCNN().to(dt)
opt = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-8)
for step in range(args.steps):
    ids, y = batch()
    loss = F.cross_entropy(model(ids).float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
