"""Classify power spectra with a half-precision conv net; validates every 15 iterations."""
import argparse
import torch
from torch import nn

ap = argparse.ArgumentParser(); ap.add_argument("--fp32", action="store_true")
DT = torch.float32 if ap.parse_args().fp32 else torch.float16
torch.manual_seed(6)


class SpecNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Conv1d(1, 12, 5, padding=2)
        self.bn = nn.BatchNorm1d(12)
        self.mid = nn.Conv1d(12, 16, 5, stride=2, padding=2)
        self.bn2 = nn.BatchNorm1d(16)
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.bn(self.front(x)))
        x = torch.relu(self.bn2(self.mid(x)))
        return self.fc(x.amax(-1))


def spectra(n):
    y = torch.randint(0, 4, (n,))
    f = torch.arange(48.)
    width = (1.0 + 1.5 * y.float())[:, None]
    c = torch.randint(10, 38, (n, 1)).float()
    line = torch.exp(-((f - c) / width) ** 2)
    return (line * 6000 + 150 * torch.rand(n, 48))[:, None], y


net = SpecNet().to(DT)
opt = torch.optim.SGD(net.parameters(), lr=0.006, momentum=0.9)
xv, yv = spectra(128)
for it in range(1, 91):
    net.train()
    x, y = spectra(24)
    loss = nn.functional.cross_entropy(net(x.to(DT)).float(), y)
    opt.zero_grad()
    (loss * 64).backward()
    for p in net.parameters():
        p.grad.div_(64)
    opt.step()
    if it % 15 == 0:
        net.eval()
        with torch.no_grad():
            o = net(xv.to(DT)).float()
        print(f"it {it} train {loss.item():.3f} val {nn.functional.cross_entropy(o, yv).item():.3f} acc {(o.argmax(1) == yv).float().mean().item():.2f}")
