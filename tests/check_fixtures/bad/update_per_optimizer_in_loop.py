"""Multi-head model with one optimizer per head and a shared loss scaler."""
import torch
from torch import nn


class MultiHead(nn.Module):
    def __init__(self, dim=128, heads=(10, 5, 2)):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, 256), nn.ReLU(), nn.Linear(256, 256))
        self.heads = nn.ModuleList(nn.Linear(256, n) for n in heads)

    def forward(self, x):
        z = self.trunk(x)
        return [head(z) for head in self.heads]


def train(loader):
    model = MultiHead().cuda()
    optimizers = [torch.optim.Adam(model.trunk.parameters(), lr=1e-4)]
    optimizers += [torch.optim.Adam(h.parameters(), lr=1e-3) for h in model.heads]
    scaler = torch.amp.GradScaler("cuda")
    ce = nn.CrossEntropyLoss()
    for x, labels in loader:
        for opt in optimizers:
            opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            outs = model(x.cuda())
            loss = sum(ce(o, t.cuda()) for o, t in zip(outs, labels))
        scaler.scale(loss).backward()
        for opt in optimizers:
            scaler.step(opt)
            scaler.update()  # expect: SCALER_UPDATE_MISPLACED
