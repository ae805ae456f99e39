import random
import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(6)
torch.manual_seed(6)


class ConditionalNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = nn.EmbeddingBag(50, 24)
        self.image = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 24))
        self.tabular = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 24))
        self.trunk = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 2))

    def forward(self, kind, x):
        return self.trunk(getattr(self, kind)(x))


def sample(kind, n=24):
    y = torch.randint(0, 2, (n,))
    if kind == "text":
        x = torch.randint(0, 50, (n, 8))
        x[:, 0] = torch.where(y == 1, torch.randint(0, 5, (n,)), torch.randint(5, 10, (n,)))
        x[:, 1] = x[:, 0]
    elif kind == "image":
        x = torch.randn(n, 1, 8, 8) * 0.5
        x[y == 1, :, :4] += 1.0
    else:
        x = torch.randn(n, 5)
        x[:, 0] += y.float() * 2.5 - 1.2
    return x, y


model = ConditionalNet()
opt = torch.optim.Adam(model.parameters(), lr=4e-3)
log = {"text": [], "image": [], "tabular": []}
for step in range(240):
    kind = random.choices(["text", "image", "tabular"], weights=[5, 4, 1])[0]
    x, y = sample(kind)
    loss = F.cross_entropy(model(kind, x), y)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    log[kind].append(loss.item())
    if (step + 1) % 40 == 0:
        print(step + 1, {k: round(sum(v[-8:]) / max(1, len(v[-8:])), 4) for k, v in log.items()})
