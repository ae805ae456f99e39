import torch
import torch.nn as nn

torch.manual_seed(42)


class FeaturePyramid(nn.Module):
    """shared trunk, several branches whose outputs are summed"""

    def __init__(self, n_in=10, width=16, n_branches=3):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(n_in, width), nn.Tanh())
        self.branches = [
            nn.Sequential(nn.Linear(width, 12), nn.ReLU(), nn.Linear(12, 8))
            for _ in range(n_branches)
        ]
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.out(sum(b(h) for b in self.branches)).squeeze(-1)


def make_data(n):
    x = torch.randn(n, 10)
    return x, torch.sin(x[:, 0]) * x[:, 1] + 0.5 * x[:, 2]


xtr, ytr = make_data(512)
xva, yva = make_data(128)
model = FeaturePyramid()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)

for epoch in range(10):
    perm = torch.randperm(len(xtr))
    model.train()
    for i in range(0, len(xtr), 32):
        j = perm[i:i + 32]
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(xtr[j]), ytr[j])
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        val = nn.functional.mse_loss(model(xva), yva).item()
print("val mse", val)
