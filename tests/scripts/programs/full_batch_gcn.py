# Node classification on one graph: every step sees the whole graph.
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(16)
N = 60
labels = torch.arange(N) % 3
prob = torch.where(labels[:, None] == labels[None], 0.3, 0.03)
A = (torch.rand(N, N) < prob).float().triu(1)
A = A + A.T + torch.eye(N)
d = A.sum(1).rsqrt()
A_hat = d[:, None] * A * d[None]
X = torch.randn(N, 8) + F.one_hot(labels, 3).float() @ torch.randn(3, 8) * 0.5
train_mask = torch.rand(N) < 0.5


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(8, 16)
        self.w2 = nn.Linear(16, 3)

    def forward(self, x, a):
        return a @ self.w2(F.dropout(F.relu(a @ self.w1(x)), 0.3, self.training))


model = GCN()
opt = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
for epoch in range(150):
    model.train()
    opt.zero_grad()
    out = model(X, A_hat)
    F.cross_entropy(out[train_mask], labels[train_mask]).backward()
    opt.step()
model.eval()
acc = (model(X, A_hat).argmax(1) == labels)[~train_mask].float().mean()
print("test acc", acc.item())
