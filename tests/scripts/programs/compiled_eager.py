import torch
from torch import nn

torch.manual_seed(23)


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(10, 24)
        self.b = nn.Linear(24, 24)
        self.c = nn.Linear(24, 4)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        h = h + torch.tanh(self.b(h))
        return self.c(h)


raw = M()
model = torch.compile(raw, backend="eager")
opt = torch.optim.AdamW(raw.parameters(), lr=3e-3)
W = torch.randn(10, 4)
for step in range(120):
    x = torch.randn(32, 10)
    y = (x @ W).argmax(1)
    loss = nn.functional.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("loss", loss.item())
