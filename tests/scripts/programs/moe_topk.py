import torch
import torch.nn as nn
import torch.nn.functional as F


class Expert(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class MoE(nn.Module):
    def __init__(self, d, n_experts=12, k=1):
        super().__init__()
        self.gate = nn.Linear(d, n_experts, bias=False)
        self.experts = nn.ModuleList(Expert(d) for _ in range(n_experts))
        self.k = k

    def forward(self, x):
        probs = F.softmax(self.gate(x), -1)
        w, idx = probs.topk(self.k, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, slot = (idx == e).nonzero(as_tuple=True)
            if rows.numel() == 0:
                continue
            out = out.index_add(0, rows, expert(x[rows]) * w[rows, slot, None])
        load = F.one_hot(idx[:, 0], len(self.experts)).float().mean(0)
        aux = len(self.experts) * (load * probs.mean(0)).sum()
        return x + out, aux


class Net(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.inp, self.moe, self.out = nn.Linear(6, d), MoE(d), nn.Linear(d, 1)

    def forward(self, x):
        h, aux = self.moe(torch.tanh(self.inp(x)))
        return self.out(h).squeeze(-1), aux


def train(steps=250, bs=16):
    torch.manual_seed(5)
    net = Net()
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    avg = 0.0
    for s in range(1, steps + 1):
        x = torch.randn(bs, 6)
        y = torch.where(x[:, 0] > 0, x[:, 1] * x[:, 2], torch.sin(2 * x[:, 3]))
        pred, aux = net(x)
        task = F.mse_loss(pred, y)
        opt.zero_grad()
        (task + 0.01 * aux).backward()
        opt.step()
        avg += task.item()
        if s % 50 == 0:
            print(f"step {s} mse {avg / 50:.4f} aux {aux.item():.3f}")
            avg = 0.0


train()
