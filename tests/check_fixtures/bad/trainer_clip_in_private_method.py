import torch
from torch import nn


class Trainer:
    """Owns the model, the optimizer and the loss scaler."""

    def __init__(self, model, optimizer, device="cuda", grad_clip=5.0):
        self.model = model.to(device)
        self.optimizer = optimizer
        self.grad_scaler = torch.amp.GradScaler(device)
        self.grad_clip = grad_clip
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.device = device

    def _clip(self):
        params = [p for p in self.model.parameters() if p.requires_grad]
        return torch.nn.utils.clip_grad_norm_(params, self.grad_clip)  # expect: SCALER_CLIP_BEFORE_UNSCALE

    def _forward(self, tokens, targets):
        with torch.autocast(self.device, dtype=torch.float16):
            logits = self.model(tokens)
            return self.criterion(logits.flatten(0, 1), targets.flatten())

    def train_step(self, tokens, targets):
        self.optimizer.zero_grad()
        loss = self._forward(tokens.to(self.device), targets.to(self.device))
        self.grad_scaler.scale(loss).backward()
        self._clip()
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        return loss.detach()

    def fit(self, loader, steps):
        history = []
        for step, (tokens, targets) in enumerate(loader):
            if step == steps:
                break
            history.append(self.train_step(tokens, targets).item())
        return history
