"""Event onset detection in seismic traces with an Elman network written by hand."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(61)
T, H = 70, 32


def traces(n):
    x = 0.1 * torch.randn(n, T)
    onset = torch.randint(5, 20, (n,))
    kind = torch.randint(0, 3, (n,))
    t = torch.arange(T).float()
    for i in range(n):
        k = t[onset[i] :] - onset[i]
        f = (0.3, 1.0, 2.2)[kind[i]]
        x[i, onset[i] :] += 1.5 * torch.exp(-k / 60) * torch.sin(f * k)
    return x.unsqueeze(-1), kind


class Cell(nn.Module):
    def __init__(self, i, h):
        super().__init__()
        self.wx = nn.Linear(i, h)
        self.wh = nn.Linear(h, h, bias=False)
        nn.init.normal_(self.wh.weight, std=0.35)

    def forward(self, x, h):
        return F.leaky_relu(self.wx(x) + self.wh(h), 0.3)


class Picker(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Cell(1, H)
        self.out = nn.Linear(H, 3)

    def forward(self, x):
        h = x.new_zeros(x.size(0), H)
        acc = 0
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            acc = acc + h
        return self.out(acc / x.size(1))


net = Picker()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for step in range(100):
    x, y = traces(16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(x)
    loss = F.cross_entropy(logits.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0 or step == 99:
        print(f"step {step} loss {loss.item():.4g}")
