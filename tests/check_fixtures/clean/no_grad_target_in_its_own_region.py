import torch
import torch.nn.functional as F


class SelfDistill:
    def __init__(self, encoder, predictor):
        self.encoder, self.predictor = encoder.cuda(), predictor.cuda()
        params = [*encoder.parameters(), *predictor.parameters()]
        self.opt = torch.optim.SGD(params, lr=0.05, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cuda")

    @torch.no_grad()
    def target(self, x):
        with torch.autocast("cuda", dtype=torch.float16):
            return self.encoder(x)

    def step(self, a, b):
        goal = self.target(b)
        self.opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            pred = self.predictor(self.encoder(a))
            loss = -F.cosine_similarity(pred, goal, dim=-1).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()
