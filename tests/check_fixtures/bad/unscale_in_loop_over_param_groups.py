import torch
import torch.nn as nn


class TwoRateTrainer:
    """Backbone and head are clipped with different limits."""

    def __init__(self, backbone, head):
        self.parts = {"backbone": (backbone, 0.1), "head": (head, 1.0)}
        params = [{"params": backbone.parameters(), "lr": 1e-5}, {"params": head.parameters(), "lr": 1e-3}]
        self.optimizer = torch.optim.AdamW(params)
        self.scaler = torch.amp.GradScaler("cuda")

    def loss(self, x, y):
        backbone, head = self.parts["backbone"][0], self.parts["head"][0]
        with torch.autocast("cuda", dtype=torch.float16):
            return nn.functional.cross_entropy(head(backbone(x)), y)

    def step(self, x, y):
        loss = self.loss(x, y)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        for module, limit in self.parts.values():
            self.scaler.unscale_(self.optimizer)  # expect: SCALER_UNSCALE_TWICE
            nn.utils.clip_grad_norm_(module.parameters(), limit)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()
