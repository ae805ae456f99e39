import torch
import torch.nn as nn

torch.manual_seed(90)


class Mixer(nn.Module):
    def __init__(self, tokens=6, dim=12):
        super().__init__()
        self.tok = nn.Linear(tokens, tokens)
        self.ch = nn.Sequential(nn.Linear(dim, 24), nn.GELU(), nn.Linear(24, dim))
        self.out = nn.Linear(dim, 3)

    def forward(self, x):
        x = x + self.tok(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.ch(x)
        return self.out(x.mean(1))


model = Mixer()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
criterion = nn.CrossEntropyLoss()
use_amp = True
proj = torch.randn(12, 3)

for step in range(140):
    x = torch.randn(24, 6, 12)
    y = (x.mean(1) @ proj).argmax(1)
    optimizer.zero_grad(set_to_none=True)
    outputs = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=use_amp):
        loss = criterion(outputs, y)
    loss.backward()
    optimizer.step()

print("loss", loss.item())
