"""Deep fully connected denoiser for short audio frames."""
import torch
import torch.nn as nn

torch.manual_seed(70)
FRAME = 32


def frames(n):
    t = torch.arange(FRAME).float()
    f = 0.1 + 0.5 * torch.rand(n, 1)
    clean = torch.sin(f * t) * (0.5 + torch.rand(n, 1))
    return clean + 0.3 * torch.randn(n, FRAME), clean


def init(m):
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight, std=0.02)
        nn.init.zeros_(m.bias)


class Denoiser(nn.Module):
    def __init__(self, depth=8, width=48):
        super().__init__()
        self.inp = nn.Linear(FRAME, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, FRAME)
        self.apply(init)

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        for layer in self.hidden:
            h = torch.tanh(layer(h))
        return self.out(h)


net = Denoiser()
opt = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
for step in range(150):
    noisy, clean = frames(16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        est = net(noisy)
    loss = nn.functional.mse_loss(est.float(), clean)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    if step % 15 == 0 or step == 149:
        print(f"step {step} mse {loss.item():.4f}")
