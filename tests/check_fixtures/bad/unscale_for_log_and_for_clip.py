import torch
import torch.nn as nn


class Runner:
    def __init__(self, model, lr=1e-4):
        self.model = model.cuda()
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cuda")
        self.grad_log = []

    def step(self, x, y):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(self.model(x), y)
        self.opt.zero_grad()
        self.scaler.scale(loss).backward()

        # norms for the dashboard
        self.scaler.unscale_(self.opt)
        norms = [p.grad.norm() for p in self.model.parameters() if p.grad is not None]
        self.grad_log.append(torch.stack(norms).norm().item())

        # clipping
        self.scaler.unscale_(self.opt)  # expect: SCALER_UNSCALE_TWICE
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()
