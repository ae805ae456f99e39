import torch
import torch.nn.functional as F

AMP = torch.float64


class PINN(torch.nn.Module):
    def __init__(self, width=64, depth=4):
        super().__init__()
        sizes = [2] + [width] * depth + [1]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))

    def forward(self, xt):
        for layer in self.layers[:-1]:
            xt = torch.tanh(layer(xt))
        return self.layers[-1](xt)


def fit(points, values, steps=2000):
    net = PINN().to("cuda")
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(steps):
        with torch.autocast("cuda", dtype=AMP):  # expect: REGION_DTYPE
            loss = F.mse_loss(net(points.cuda()), values.cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
    return net
