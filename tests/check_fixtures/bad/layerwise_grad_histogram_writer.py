import torch
from torch.utils.tensorboard import SummaryWriter


class DetectorTrainer:
    def __init__(self, detector, optimizer, log_dir):
        self.detector = detector
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler("cuda")
        self.writer = SummaryWriter(log_dir)
        self.iteration = 0

    def log_gradients(self):
        for name, param in self.detector.named_parameters():
            if param.grad is None:
                continue
            self.writer.add_histogram(f"grad/{name}", param.grad, self.iteration)  # expect: SCALER_GRADS_STILL_SCALED

    def step(self, images, targets):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            losses = self.detector(images, targets)
            total = sum(losses.values())
        self.scaler.scale(total).backward()
        if self.iteration % 100 == 0:
            self.log_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.iteration += 1
        return {k: v.item() for k, v in losses.items()}
