import torch
import torch.nn.functional as F


class Stepper:
    """unscale_ appears twice in the text, but only one of the branches runs per step."""

    def __init__(self, model, opt):
        self.model, self.opt = model, opt
        self.scaler = torch.amp.GradScaler("cuda")

    def finish(self, mode):
        if mode == "clip":
            self.scaler.unscale_(self.opt)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        elif mode == "log":
            self.scaler.unscale_(self.opt)
            print(max(p.grad.abs().max().item() for p in self.model.parameters() if p.grad is not None))
        self.scaler.step(self.opt)
        self.scaler.update()

    def __call__(self, x, y, mode="clip"):
        self.opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.finish(mode)
        return loss.item()
