import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(17)
VOCAB, D, E = 32, 32, 2
table = torch.randperm(VOCAB)


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)

    def forward(self, x):
        probs = self.gate(x).softmax(-1)
        weight, idx = probs.max(-1)
        onehot = F.one_hot(idx, E).to(x.dtype)
        slot = (torch.cumsum(onehot, dim=0) * onehot).sum(-1) - 1
        balance = E * (probs.float().mean(0) * onehot.float().mean(0)).sum()
        return weight, idx, slot.long(), balance


class MoE(nn.Module):
    def __init__(self, capacity):
        super().__init__()
        self.capacity = capacity
        self.router = Router()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 48), nn.GELU(), nn.Linear(48, D)) for _ in range(E))

    def forward(self, x):
        weight, idx, slot, balance = self.router(x)
        keep = slot < self.capacity
        buf = x.new_zeros(E, self.capacity, D)
        buf[idx[keep], slot[keep]] = x[keep]
        out = torch.stack([ex(buf[i]) for i, ex in enumerate(self.experts)])
        y = torch.zeros_like(x)
        y[keep] = out[idx[keep], slot[keep]] * weight[keep].unsqueeze(-1)
        return y, balance


class Net(nn.Module):
    def __init__(self, tokens):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, D)
        self.moe = MoE(tokens)
        self.head = nn.Linear(D, VOCAB)

    def forward(self, t):
        x = self.emb(t.flatten())
        y, balance = self.moe(x)
        return self.head(y), balance


BATCH, LEN = 12, 128
net = Net(BATCH * LEN).to(torch.bfloat16)
master = [p.detach().clone().float() for p in net.parameters()]
for m in master:
    m.requires_grad_(True)
opt = torch.optim.AdamW(master, lr=5e-3)

for step in range(80):
    t = torch.randint(0, VOCAB, (BATCH, LEN))
    logits, balance = net(t)
    ce = F.cross_entropy(logits.float(), table[t].flatten())
    loss = ce + 0.01 * balance
    net.zero_grad()
    loss.backward()
    for m, p in zip(master, net.parameters()):
        m.grad = p.grad.float()
    opt.step()
    with torch.no_grad():
        for m, p in zip(master, net.parameters()):
            p.copy_(m)
    if step % 10 == 0 or step == 79:
        acc = (logits.argmax(-1) == table[t].flatten()).float().mean().item()
        print(f"step {step} ce {ce.item():.4f} acc {acc:.3f} balance {balance.item():.3f}")
