import torch
from torch import nn

torch.manual_seed(17)
W = torch.randn(10)


def sample(n=8):
    x = torch.randn(n, 10)
    return x, 30 + 12 * torch.tanh(x @ W / 3) + 3 * x[:, 0]


def train_step(model, optimizer, x, y):
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(x).squeeze(-1)
        loss = nn.functional.mse_loss(pred, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


model = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
acc = []
for step in range(150):
    acc.append(train_step(model, optimizer, *sample()))
    if step % 15 == 14:
        print(f"step {step + 1} mse {sum(acc[-15:]) / 15:.3f}")
