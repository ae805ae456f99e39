import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(11)
accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=8)

peaks = torch.rand(1600, 1) * 30 + 1
grid = torch.arange(32.0)
spectra = 2 * torch.exp(-0.5 * (grid - peaks) ** 2 / 6)
spectra += 0.02 * torch.randn_like(spectra)
target = (peaks - 16) / 10

model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
loader = DataLoader(TensorDataset(spectra, target), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

running = []
for i, (x, y) in enumerate(loader):
    with accelerator.accumulate(model):
        model.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), y)
        accelerator.backward(loss)
        optimizer.step()
    running.append(loss.item())
    if i % 100 == 99:
        accelerator.print(f"iter {i + 1} loss {sum(running[-100:]) / 100:.4f}")
with torch.no_grad():
    print("final", nn.functional.mse_loss(model(spectra).float(), target).item())
