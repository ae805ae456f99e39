import torch
from torch import nn


class ClickModel(nn.Module):
    def __init__(self, fields, dim=16):
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(n, dim) for n in fields)
        self.mlp = nn.Sequential(nn.Linear(dim * len(fields), 64), nn.ReLU(), nn.Linear(64, 1), nn.Sigmoid())

    def forward(self, x):
        cols = [e(x[:, i]) for i, e in enumerate(self.emb)]
        return self.mlp(torch.cat(cols, dim=1)).squeeze(1)


class Fitter:
    def __init__(self, fields):
        self.model = ClickModel(fields).to("cuda")
        self.criterion = nn.BCELoss()
        self.optim = torch.optim.Adagrad(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, x, clicked):
        self.optim.zero_grad()
        with torch.autocast("cuda"):
            prob = self.model(x)
            loss = self.criterion(prob, clicked)  # expect: REGION_BCE
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optim)
        self.scaler.update()
        return loss.item()
