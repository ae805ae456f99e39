import torch
import torch.nn as nn


class LitLike:
    def __init__(self, net, lr):
        self.net = net
        self.opt = torch.optim.AdamW(net.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cuda")
        self.criterion = nn.CrossEntropyLoss()

    def predict(self, x):
        with torch.autocast("cuda", dtype=torch.float16):
            return self.net(x)

    def compute_loss(self, logits, y):
        return self.criterion(logits, y)  # expect: REGION_LOSS_OUTSIDE

    def training_step(self, x, y):
        logits = self.predict(x)
        loss = self.compute_loss(logits, y)
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()

    @torch.no_grad()
    def accuracy(self, loader):
        hits = total = 0
        for x, y in loader:
            pred = self.predict(x).argmax(-1)
            hits += (pred == y).sum().item()
            total += y.numel()
        return hits / total
