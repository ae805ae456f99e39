import torch
import torch.nn.functional as F


class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.total += value * n
        self.count += n

    @property
    def mean(self):
        return self.total / max(self.count, 1)


def train(model, loader):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    meter, ema = Meter(), None
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(x.cuda())
            loss = F.cross_entropy(logits, y.cuda())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        value = loss.detach().float().item()
        meter.update(value, len(x))
        ema = value if ema is None else 0.99 * ema + 0.01 * value
    return meter.mean, ema
