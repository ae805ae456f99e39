import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(1)
np.random.seed(1)
N_USERS, N_ITEMS, K = 120, 90, 12

U = np.random.randn(N_USERS, 4) * 0.7
V = np.random.randn(N_ITEMS, 4) * 0.7
R = 3.5 + U @ V.T + np.random.randn(N_USERS, N_ITEMS) * 0.2


class BiasedMF(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(N_USERS, K)
        self.items = nn.Embedding(N_ITEMS, K)
        self.bu = nn.Embedding(N_USERS, 1)
        self.bi = nn.Embedding(N_ITEMS, 1)
        self.mu = nn.Parameter(torch.tensor(3.0))
        nn.init.normal_(self.users.weight, std=0.9)
        nn.init.normal_(self.items.weight, std=0.9)
        nn.init.zeros_(self.bu.weight)
        nn.init.zeros_(self.bi.weight)

    def forward(self, u, i):
        dot = (self.users(u) * self.items(i)).sum(-1)
        return dot + self.bu(u).squeeze(-1) + self.bi(i).squeeze(-1) + self.mu


model = BiasedMF().to(torch.bfloat16)
opt = torch.optim.Adam(model.parameters(), lr=1.5e-3)

seen = 0.0
for step in range(200):
    u = np.random.randint(0, N_USERS, 2048)
    i = np.random.randint(0, N_ITEMS, 2048)
    r = torch.tensor(R[u, i], dtype=torch.float32)
    pred = model(torch.from_numpy(u), torch.from_numpy(i)).float()
    loss = (pred - r).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    seen = loss.item() if step == 0 else 0.9 * seen + 0.1 * loss.item()
    if step % 20 == 0 or step == 199:
        print(f"step {step:3d} mse {seen:.4f}")
