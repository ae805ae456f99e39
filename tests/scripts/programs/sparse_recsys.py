import torch
import torch.nn as nn
import torch.nn.functional as F


class Recommender(nn.Module):
    def __init__(self, users=500, items=800, d=12):
        super().__init__()
        self.u = nn.Embedding(users, d, sparse=True)
        self.i = nn.Embedding(items, d, sparse=True)
        self.bias = nn.Embedding(items, 1, sparse=True)
        self.mlp = nn.Sequential(nn.Linear(2 * d, 24), nn.ReLU(), nn.Linear(24, 1))
        nn.init.normal_(self.u.weight, 0, 0.3)
        nn.init.normal_(self.i.weight, 0, 0.3)
        nn.init.zeros_(self.bias.weight)

    def forward(self, u, i):
        a, b = self.u(u), self.i(i)
        return (a * b).sum(1) + self.bias(i).squeeze(1) + self.mlp(torch.cat([a, b], 1)).squeeze(1)


def main(steps=300):
    torch.manual_seed(11)
    tu, ti = torch.randn(500, 3), torch.randn(800, 3)
    pop = torch.randn(800) * 1.5
    model = Recommender()
    sparse_opt = torch.optim.SparseAdam([*model.u.parameters(), *model.i.parameters(), *model.bias.parameters()], lr=2e-2)
    dense_opt = torch.optim.Adam(model.mlp.parameters(), lr=2e-3)
    hist = []
    for s in range(1, steps + 1):
        u, i = torch.randint(0, 500, (256,)), torch.randint(0, 800, (256,))
        y = ((tu[u] * ti[i]).sum(1) + pop[i] + 0.3 * torch.randn(256) > 0).float()
        loss = F.binary_cross_entropy_with_logits(model(u, i), y)
        sparse_opt.zero_grad()
        dense_opt.zero_grad()
        loss.backward()
        sparse_opt.step()
        dense_opt.step()
        hist.append(loss.item())
        if s % 50 == 0:
            print(f"step {s} bce {sum(hist[-50:]) / 50:.4f}")


if __name__ == "__main__":
    main()
