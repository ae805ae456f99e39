import torch
from torch import nn
from torchvision.ops import MLP

torch.manual_seed(23)


def alloys(n):
    x = torch.rand(n, 12)
    y = 2 * x[:, 0] * x[:, 1] + torch.sin(4 * x[:, 2]) - x[:, 3] ** 2
    return x, y[:, None]


def build():
    net = MLP(12, [64, 64, 64, 64, 64, 1], activation_layer=nn.ReLU, inplace=None, dropout=0.0)
    for m in net.modules():
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, std=0.01)
            nn.init.zeros_(m.bias)
    return net


def run():
    x, y = alloys(1024)
    vx, vy = alloys(256)
    mu, sd = y.mean(), y.std()
    net = build()
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for step in range(200):
        i = torch.randint(0, len(x), (32,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pred = net(x[i])
        loss = nn.functional.mse_loss(pred.float(), (y[i] - mu) / sd)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            with torch.no_grad():
                val = nn.functional.mse_loss(net(vx), (vy - mu) / sd)
            print(f"step {step} train {loss.item():.4f} val {val.item():.4f}")


run()
