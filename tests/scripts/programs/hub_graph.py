"""Node classification on a hub-and-spoke graph with isolated nodes; messages summed in fp32."""
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

bf16 = "--fp32" not in sys.argv
torch.manual_seed(88)
N, C = 120, 3
label = torch.randint(0, C, (N,))
src, dst = [], []
for i in range(N):
    if i % 10 == 9:
        continue                                       # isolated
    same = (label == label[i]).nonzero().flatten()
    for j in same[torch.randperm(len(same))[:4]].tolist():
        if j % 10 != 9:
            src.append(i); dst.append(j)
    src += [i, 0]; dst += [0, i]                       # node 0 is a hub
src, dst = torch.tensor(src), torch.tensor(dst)
feat = torch.randn(N, 8) + F.one_hot(label, 8).float() * .8
train = torch.rand(N) < .6


class SumConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.msg, self.self_ = nn.Linear(i, o), nn.Linear(i, o)
        deg = torch.zeros(N).index_add_(0, dst, torch.ones(len(dst)))
        self.register_buffer("deg", deg)

    def forward(self, h):
        m = self.msg(h).float()[src]
        agg = torch.zeros(N, m.size(1)).index_add(0, dst, m)
        return self.self_(h).float() + agg / self.deg.clamp(min=1)[:, None]


class GNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = SumConv(8, 32), SumConv(32, C)

    def forward(self, x):
        return self.c2(F.relu(self.c1(x)))


net = GNN()
opt = torch.optim.Adam(net.parameters(), lr=1e-2, weight_decay=1e-4)
for ep in range(100):
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        out = net(feat)
        loss = F.cross_entropy(out[train].float(), label[train])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if ep % 10 == 9:
        print(f"epoch {ep} loss {loss.item():.4f} held-out acc {(out[~train].argmax(1) == label[~train]).float().mean().item():.3f}")
