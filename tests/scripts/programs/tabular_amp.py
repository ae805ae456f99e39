import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
N, D, C = 1024, 24, 5
EPOCHS, BATCH = 4, 16


def make_data():
    x = torch.randn(N, D)
    proj = torch.randn(D, C)
    y = (x @ proj + 0.3 * torch.randn(N, C)).argmax(1)
    return TensorDataset(x, y)


class TabNet(nn.Module):
    def __init__(self, d, h, c):
        super().__init__()
        self.inp = nn.Linear(d, h)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(h), nn.Linear(h, h), nn.GELU(), nn.Linear(h, h)) for _ in range(2)
        )
        self.out = nn.Linear(h, c)

    def forward(self, x):
        h = self.inp(x)
        for b in self.blocks:
            h = h + b(h)
        return self.out(h)


loader = DataLoader(make_data(), batch_size=BATCH, shuffle=True, drop_last=True)
model = TabNet(D, 48, C)
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
criterion = nn.CrossEntropyLoss()
print("training with bfloat16 autocast")
step = 0
for epoch in range(EPOCHS):
    for xb, yb in loader:
        opt.zero_grad(set_to_none=True)
        logits = model(xb)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = criterion(logits, yb)
        loss.backward()
        opt.step()
        step += 1
        if step % 32 == 0:
            acc = (logits.argmax(1) == yb).float().mean()
            print(f"epoch {epoch} step {step} loss {loss.item():.4f} acc {acc.item():.3f}")
