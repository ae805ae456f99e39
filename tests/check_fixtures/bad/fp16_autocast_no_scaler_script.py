# Quick experiment: does half precision make this faster?
import torch
import torch.nn as nn

device = "cuda"
torch.manual_seed(0)

model = nn.Sequential(
    nn.Conv1d(1, 32, 9, padding=4),
    nn.ReLU(),
    nn.Conv1d(32, 32, 9, padding=4),
    nn.ReLU(),
    nn.AdaptiveAvgPool1d(1),
    nn.Flatten(),
    nn.Linear(32, 5),
).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()

signals = torch.randn(1024, 1, 512)
labels = torch.randint(0, 5, (1024,))

for epoch in range(10):
    perm = torch.randperm(len(signals))
    for start in range(0, len(signals), 64):
        batch = perm[start : start + 64]
        x, y = signals[batch].to(device), labels[batch].to(device)
        optimizer.zero_grad()
        with torch.autocast(device_type=device, dtype=torch.float16):
            out = model(x)
            loss = criterion(out, y)
        loss.backward()  # expect: SCALER_MISSING
        optimizer.step()
    print(epoch, loss.item())
