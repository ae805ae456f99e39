"""Self-distillation: the same encoder gives the target without grad and the prediction with grad."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.fc1 = nn.Linear(dim, 256)
        self.fc2 = nn.Linear(256, dim)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def train(loader, steps=1000):
    encoder, predictor = Encoder().cuda(), nn.Linear(128, 128).cuda()
    opt = torch.optim.SGD([*encoder.parameters(), *predictor.parameters()], lr=0.05)
    scaler = torch.amp.GradScaler("cuda")
    for _, (a, b) in zip(range(steps), loader):
        a, b = a.cuda(), b.cuda()
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            with torch.no_grad():
                target = encoder(b)
            pred = predictor(encoder(a))  # expect: REGION_CACHE
            loss = -F.cosine_similarity(pred, target, dim=-1).mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
