import torch
from torch import nn


class MultiLabel(nn.Module):
    def __init__(self, backbone, dim, labels):
        super().__init__()
        self.backbone = backbone
        self.fc = nn.Linear(dim, labels)
        self.loss = nn.BCEWithLogitsLoss(pos_weight=torch.full((labels,), 3.0))

    def forward(self, x, target=None):
        logits = self.fc(self.backbone(x))
        if target is None:
            return torch.sigmoid(logits)
        return self.loss(logits, target)


def train(model, loader, epochs):
    model = model.cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(epochs):
        for x, t in loader:
            with torch.autocast("cuda"):
                loss = model(x.cuda(), t.cuda())
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
