import torch
import torch.nn as nn


class FocalLoss(nn.Module):
    def __init__(self, gamma=2.0):
        super().__init__()
        self.gamma = gamma

    def forward(self, logits, target):
        logits = logits.float()
        logp = torch.log_softmax(logits, dim=-1)
        picked = logp.gather(1, target[:, None]).squeeze(1)
        return (-((1 - picked.exp()) ** self.gamma) * picked).mean()


def train(model, loader):
    focal = FocalLoss()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x.cuda())
        loss = focal(out, y.cuda())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
