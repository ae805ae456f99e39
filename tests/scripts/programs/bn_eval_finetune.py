"""Fine-tune with all BatchNorm layers in eval mode (tiny batches, pretrained statistics)."""
import torch
import torch.nn as nn

torch.manual_seed(18)
net = nn.Sequential(
    nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(),
    nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
    nn.Flatten(), nn.Linear(72, 3))


def data(n):
    y = torch.randint(0, 3, (n,))
    x = 1.5 * torch.randn(n, 1, 6, 6)
    for i, c in enumerate(y.tolist()):
        x[i, 0, :, 2 * c:2 * c + 2] += 1
    return x, y


# "pretraining" gives the running statistics
net.train()
with torch.no_grad():
    for _ in range(30):
        net(data(32)[0])


def train_mode_but_bn(m):
    m.train()
    for mod in m.modules():
        if isinstance(mod, nn.modules.batchnorm._BatchNorm):
            mod.eval()


opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
train_mode_but_bn(net)
for step in range(150):
    x, y = data(4)
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("loss", loss.item())
