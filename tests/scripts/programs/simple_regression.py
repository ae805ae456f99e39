import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(2024)

# synthetic house prices
n = 480
area = torch.rand(n, 1) * 2
rooms = torch.randint(1, 6, (n, 1)).float() / 5
age = torch.rand(n, 1)
X = torch.cat([area, rooms, age, torch.randn(n, 3) * 0.1], 1)
y = 1.2 * area + 0.8 * rooms - 0.5 * age + 0.05 * torch.randn(n, 1)

train_loader = DataLoader(TensorDataset(X, y), batch_size=32, shuffle=True)

model = torch.nn.Sequential(
    torch.nn.Linear(6, 20),
    torch.nn.Sigmoid(),
    torch.nn.Linear(20, 1),
)
loss_fn = torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.002)

epoch_losses = []
for epoch in range(10):
    total = 0.0
    for xb, yb in train_loader:
        pred = model(xb)
        loss = loss_fn(pred, yb)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(xb)
    epoch_losses.append(total / n)

print("best epoch loss", min(epoch_losses))
