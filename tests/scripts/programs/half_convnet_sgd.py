import torch
import torch.nn as nn
import torch.nn.functional as F


class HalfNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.norm(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


def batch(n=16):
    y = torch.randint(0, 4, (n,))
    x = torch.randn(n, 1, 8, 8) * 0.3
    for k in range(4):
        x[y == k, :, (k // 2) * 4:(k // 2) * 4 + 4] += 0.7
        x[y == k, :, :, :: 2 + k % 2] += 0.8
    return x.half(), y


def main():
    torch.manual_seed(16)
    model = HalfNet().half()
    opt = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.8)
    SCALE = 128.0
    hist = []
    for step in range(150):
        x, y = batch()
        loss = F.cross_entropy(model(x).float(), y)
        opt.zero_grad()
        (loss * SCALE).backward()
        for p in model.parameters():
            p.grad.div_(SCALE)
        opt.step()
        hist.append(loss.item())
        if (step + 1) % 25 == 0:
            print(f"step {step + 1} loss {sum(hist[-25:]) / 25:.4f}")


main()
