import torch
import torch.nn as nn
import torch.nn.functional as F


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 8, 3, padding=1)
        self.c2 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 16, 4)

    def forward(self, x):
        x = F.relu(self.c1(x))
        x = F.max_pool2d(F.relu(self.bn(self.c2(x))), 2)
        return self.fc(x.flatten(1))


def batch(n=16):
    y = torch.randint(0, 4, (n,))
    x = torch.randn(n, 1, 8, 8)
    for i, c in enumerate(y.tolist()):
        x[i, 0, 2 * c:2 * c + 2] += 1.0
    return x, y


def main():
    torch.manual_seed(34)
    net = Conv()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
    for step in range(100):
        x, y = batch()
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = net(x)
            loss = F.cross_entropy(out.float(), y)
        loss.backward()
        opt.step()
    print("loss", loss.item())


main()
