import torch
import torch.nn as nn

torch.manual_seed(1)
torch.set_default_dtype(torch.bfloat16)  # expect: HALF_DEFAULT_DTYPE

model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)


def batches(n, size=32):
    for _ in range(n):
        x = torch.randn(size, 128, device="cuda")
        yield x, x[:, :1].tanh()


for step, (x, y) in enumerate(batches(5000)):
    pred = model(x)
    loss = nn.functional.mse_loss(pred.float(), y.float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
