import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(29)
N, C = 120, 3
labels = torch.arange(N) % C
same = labels[:, None] == labels[None]
adj = (torch.rand(N, N) < torch.where(same, 0.12, 0.02)).float()
adj = ((adj + adj.t()) > 0).float() + torch.eye(N)
deg = adj.sum(1).rsqrt()
A = deg[:, None] * adj * deg[None]
feats = torch.randn(N, 16) + 0.5 * F.one_hot(labels, 16).float()
train_mask = torch.rand(N) < 0.4


class GCN(nn.Module):
    def __init__(self, d, h, c):
        super().__init__()
        self.w1, self.w2 = nn.Linear(d, h), nn.Linear(h, c)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, a):
        h = F.relu(a @ self.w1(x))
        return a @ self.w2(self.drop(h))


model = GCN(16, 24, C)
opt = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
for epoch in range(150):
    model.train()
    out = model(feats, A)
    loss = F.cross_entropy(out[train_mask], labels[train_mask])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if epoch % 25 == 0:
        model.eval()
        with torch.no_grad():
            acc = (model(feats, A).argmax(1) == labels)[~train_mask].float().mean().item()
        print(f"epoch {epoch} loss {loss.item():.4f} test acc {acc:.3f}")
