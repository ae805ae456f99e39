"""Object detector fine-tuning: small GPU, four micro-batches per step."""
import torch

MICRO_BATCHES = 4


class Loop:
    def __init__(self, detector, optimizer, scheduler):
        self.detector = detector.cuda()
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = torch.amp.GradScaler("cuda")
        self.seen = 0

    def is_boundary(self):
        return self.seen % MICRO_BATCHES == 0

    def micro_batch(self, images, targets):
        self.seen += 1
        with torch.autocast("cuda", dtype=torch.float16):
            losses = self.detector(images, targets)
            loss = sum(losses.values()) / MICRO_BATCHES
        self.scaler.scale(loss).backward()
        if self.seen % MICRO_BATCHES == 0:
            self.scaler.step(self.optimizer)
            self.optimizer.zero_grad(set_to_none=True)
            self.scheduler.step()
        self.scaler.update()  # expect: SCALER_IN_ACCUMULATION

    def run(self, loader):
        for images, targets in loader:
            images = [im.cuda() for im in images]
            targets = [{k: v.cuda() for k, v in t.items()} for t in targets]
            self.micro_batch(images, targets)
