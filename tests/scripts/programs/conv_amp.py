import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler

torch.manual_seed(13)
MAX_NORM = 1.0


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        return self.fc(F.relu(self.c2(F.relu(self.c1(x)))).mean((2, 3)))


def images(n=16):
    y = torch.randint(0, 3, (n,))
    x = torch.randn(n, 1, 8, 8) * 0.3
    x[y == 1] += 1.0
    x[y == 2, :, ::2] += 1.5
    return x, y


model = Conv()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = GradScaler("cpu", init_scale=2.0 ** 14)
hist = []
for step in range(120):
    x, y = images()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    scaler.step(optimizer)
    scaler.update()
    hist.append(loss.item())
    if (step + 1) % 20 == 0:
        print(f"step {step + 1} loss {sum(hist[-20:]) / 20:.4f} scale {scaler.get_scale():.0f}")
