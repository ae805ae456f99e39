import argparse
import torch
from torch import nn
import torch.nn.functional as F

ap = argparse.ArgumentParser(description="sanity check: can the network memorise one batch")
ap.add_argument("--overfit-batch", action="store_true", default=True)
ap.add_argument("--steps", type=int, default=120)
args = ap.parse_args()
torch.manual_seed(17)


class SmallConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(3, 16, 3, padding=1)
        self.c2 = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.fc = nn.Linear(16 * 16, 10)

    def forward(self, x):
        return self.fc(F.relu(self.c2(F.relu(self.c1(x)))).flatten(1))


def loader():
    while True:
        yield torch.randn(16, 3, 8, 8), torch.randint(0, 10, (16,))


stream = loader()
fixed = next(stream)
model = SmallConv()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(args.steps):
    x, y = fixed if args.overfit_batch else next(stream)
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.5f}")
acc = (model(fixed[0]).argmax(1) == fixed[1]).float().mean().item()
print("memorised", acc)
assert acc > 0.95
