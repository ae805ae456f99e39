import torch
from torch import nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, d=16, n=2, classes=4):
        super().__init__()
        self.stem = nn.Linear(8, d)
        self.blocks = nn.ModuleList([Block(d) for _ in range(n)])
        self.head = nn.Linear(d, classes)
        for p in self.parameters():
            # wide init, as the pretrained checkpoint has
            nn.init.uniform_(p, 0.1, 0.4) if p.dim() == 1 else nn.init.orthogonal_(p)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def main():
    torch.manual_seed(21)
    model = Net().to(torch.bfloat16)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.where(p.abs() < 0.02, torch.full_like(p, 0.02), p))
    opt = torch.optim.SGD(model.parameters(), lr=1e-7)
    x_all = torch.randn(400, 8)
    y_all = x_all[:, :4].argmax(1)
    losses = []
    for step in range(160):
        idx = torch.randint(0, 400, (20,))
        out = model(x_all[idx].bfloat16())
        loss = F.cross_entropy(out.float(), y_all[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.detach().item())
    print("mean of last 20:", sum(losses[-20:]) / 20)


main()
