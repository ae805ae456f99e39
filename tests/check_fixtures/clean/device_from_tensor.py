import torch
import torch.nn as nn
import torch.nn.functional as F


class Head(nn.Module):
    def __init__(self, dim, classes):
        super().__init__()
        self.fc = nn.Linear(dim, classes)

    def forward(self, x, y):
        with torch.autocast(device_type=x.device.type, enabled=False):
            logits = self.fc(x.float())
            return F.cross_entropy(logits, y)


def train(body, loader, device):
    device = torch.device(device)
    head = Head(128, 10).to(device)
    body = body.to(device)
    opt = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-4)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        with torch.autocast(device_type=device.type, dtype=torch.bfloat16):
            loss = head(body(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
