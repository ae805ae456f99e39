import torch
import torch.nn as nn


class Experiment:
    def __init__(self, cfg):
        self.model = nn.TransformerEncoderLayer(cfg["dim"], cfg["heads"], batch_first=True).cuda()
        self.proj = nn.Linear(cfg["dim"], cfg["classes"]).cuda()
        params = list(self.model.parameters()) + list(self.proj.parameters())
        self.optim = torch.optim.AdamW(params, lr=cfg["lr"])
        self.sched = torch.optim.lr_scheduler.StepLR(self.optim, 1000, 0.5)
        self.gs = torch.amp.GradScaler("cuda")

    def one_step(self, seq, label):
        with torch.autocast("cuda", dtype=torch.float16):
            hidden = self.model(seq)
            logits = self.proj(hidden[:, 0])
            loss = nn.functional.cross_entropy(logits, label)
        self.gs.scale(loss).backward()
        self.gs.unscale_(self.optim)
        nn.utils.clip_grad_norm_(self.proj.parameters(), 1.0)
        self.gs.step(self.optim)
        self.gs.update()
        self.optim.step()  # expect: SCALER_STEP_BYPASSED
        self.sched.step()
        self.optim.zero_grad(set_to_none=True)
        return loss.item()
