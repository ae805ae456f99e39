import random
import torch
import torch.nn as nn

random.seed(7)
torch.manual_seed(7)


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 16)
        self.heads = nn.ModuleDict({
            "cls": nn.Linear(16, 3),
            "reg": nn.Linear(16, 1),
            "rec": nn.Linear(16, 6),
        })

    def forward(self, x, task):
        return self.heads[task](torch.relu(self.trunk(x)))


net = MultiTask()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
W = torch.randn(6, 3)
last = {}
for step in range(180):
    task = random.choices(["cls", "reg", "rec"], weights=[6, 3, 1])[0]
    x = torch.randn(16, 6)
    out = net(x, task)
    if task == "cls":
        loss = nn.functional.cross_entropy(out, (x @ W).argmax(1))
    elif task == "reg":
        loss = nn.functional.mse_loss(out.squeeze(1), x.abs().mean(1))
    else:
        loss = nn.functional.mse_loss(out, x)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    last[task] = loss.item()
print(last)
