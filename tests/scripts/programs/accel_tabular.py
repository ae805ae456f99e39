import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(4)
accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=4)
X = torch.randn(2560, 12)
w = torch.randn(12, 3)
y = (X @ w).argmax(-1)
flip = torch.rand(len(y)) < 0.1
y[flip] = torch.randint(0, 3, (int(flip.sum()),))

model = nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
sched = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=160)
loader = DataLoader(TensorDataset(X, y), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

window = []
for i, (a, b) in enumerate(loader):
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(a).float(), b)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if accelerator.sync_gradients:
            sched.step()
        optimizer.zero_grad()
    window.append(loss.item())
    if i % 80 == 79:
        accelerator.print(f"iter {i + 1} loss {sum(window[-80:]) / 80:.4f} lr {sched.get_last_lr()[0]:.5f}")
model.eval()
with torch.no_grad():
    print("acc", (model(X).argmax(-1) == y).float().mean().item())
