import contextlib
import torch


class Engine:
    def __init__(self, net, optim, loss_fn, *, amp=True):
        self.net, self.optim, self.loss_fn = net, optim, loss_fn
        self.amp = amp
        self.scaler = torch.amp.GradScaler("cuda", enabled=amp)

    @property
    def ctx(self):
        return torch.autocast("cuda", torch.float16) if self.amp else contextlib.nullcontext()

    def forward(self, batch):
        with self.ctx:
            out = self.net(batch["input"])
            return self.loss_fn(out, batch["target"])

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def optimize(self):
        self.scaler.step(self.optim)  # expect: SCALER_UPDATE_MISSING
        self.optim.zero_grad(set_to_none=True)

    def run(self, loader):
        total, count = 0.0, 0
        for batch in loader:
            batch = {k: v.cuda() for k, v in batch.items()}
            loss = self.forward(batch)
            self.backward(loss)
            self.optimize()
            total += loss.item() * len(batch["input"])
            count += len(batch["input"])
        return total / max(count, 1)
