# MC dropout: uncertainty is estimated with dropout active during evaluation, BN in eval.
import torch
import torch.nn as nn

torch.manual_seed(40)
net = nn.Sequential(nn.Linear(4, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 1))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
xv = torch.randn(40, 4)


def enable_dropout(m):
    for s in m.modules():
        if isinstance(s, nn.Dropout):
            s.train()


@torch.no_grad()
def mc_predict(m, x, k=8):
    m.eval()
    enable_dropout(m)
    p = torch.stack([m(x) for _ in range(k)])
    m.train()
    return p.mean(0), p.std(0)


net.train()
for step in range(150):
    x = torch.randn(24, 4)
    y = x[:, :1] * 2 - x[:, 1:2].abs()
    loss = nn.functional.mse_loss(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if (step + 1) % 50 == 0:
        mean, std = mc_predict(net, xv)
print("loss", loss.item(), "mean std", std.mean().item())
