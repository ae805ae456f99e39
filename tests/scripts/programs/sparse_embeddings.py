import torch
import torch.nn as nn

torch.manual_seed(12)


class MF(nn.Module):
    """matrix factorisation with sparse gradients"""
    def __init__(self, users=60, items=50, k=6):
        super().__init__()
        self.u = nn.Embedding(users, k, sparse=True)
        self.i = nn.Embedding(items, k, sparse=True)
        self.bu = nn.Embedding(users, 1, sparse=True)
        nn.init.normal_(self.u.weight, std=0.3)
        nn.init.normal_(self.i.weight, std=0.3)
        nn.init.zeros_(self.bu.weight)

    def forward(self, u, i):
        return (self.u(u) * self.i(i)).sum(1) + self.bu(u).squeeze(1)


P, Q = torch.randn(60, 3), torch.randn(50, 3)
model = MF()
opt = torch.optim.SparseAdam(list(model.parameters()), lr=2e-2)
tot = 0.
for step in range(220):
    u, i = torch.randint(0, 60, (24,)), torch.randint(0, 50, (24,))
    r = (P[u] * Q[i]).sum(1)
    loss = ((model(u, i) - r) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    tot = 0.95 * tot + 0.05 * loss.item()
print("smoothed mse", tot)
