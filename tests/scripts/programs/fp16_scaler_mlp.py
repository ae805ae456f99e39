import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 48), nn.Linear(48, 48), nn.Linear(48, 3)
        self.norm = nn.LayerNorm(48)

    def forward(self, x):
        h = F.relu(self.a(x))
        return self.c(self.norm(h + F.relu(self.b(h))))


def train(steps=120, bs=16, dtype=torch.float16):
    torch.manual_seed(26)
    W = torch.randn(16, 3)
    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
    hist = []
    for i in range(steps):
        x = torch.randn(bs, 16)
        y = (x @ W).argmax(1)
        with torch.autocast("cpu", dtype=dtype):
            out = net(x)
        loss = F.cross_entropy(out.float(), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        scaler.step(opt)
        scaler.update()
        hist.append(loss.item())
        if (i + 1) % 20 == 0:
            print(f"step {i + 1} loss {sum(hist[-20:]) / 20:.4f} scale {scaler.get_scale():.0f}")


if __name__ == "__main__":
    train()
