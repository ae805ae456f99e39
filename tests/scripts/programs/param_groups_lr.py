import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 20), nn.LayerNorm(20), nn.GELU(), nn.Linear(20, 12), nn.GELU())
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.body(x))


def groups(net):
    decay, nodecay = [], []
    for n, p in net.body.named_parameters():
        (decay if p.dim() > 1 else nodecay).append(p)
    return [
        {"params": decay, "lr": 1e-5, "weight_decay": 0.01},
        {"params": nodecay, "lr": 1e-5, "weight_decay": 0.0},
        {"params": net.head.parameters(), "lr": 5e-3, "weight_decay": 0.01},
    ]


torch.manual_seed(29)
net = Net()
opt = torch.optim.AdamW(groups(net), lr=1e-3)
W = torch.randn(8, 3)
for step in range(160):
    x = torch.randn(32, 8)
    y = (x @ W).argmax(1)
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("loss", loss.item())
