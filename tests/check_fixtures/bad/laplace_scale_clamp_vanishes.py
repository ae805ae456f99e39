import torch
import torch.nn as nn
import torch.nn.functional as F


class LaplaceHead(nn.Module):
    """Predicts a location and a scale per coordinate."""

    def __init__(self, dim, coords):
        super().__init__()
        self.loc = nn.Linear(dim, coords)
        self.scale = nn.Linear(dim, coords)

    def forward(self, h, target):
        scale = F.relu(self.scale(h)).clamp(min=1e-9)  # expect: NUM_EPS_UNDERFLOW
        err = (target - self.loc(h)).abs()
        return (err / scale + torch.log(2 * scale)).mean()


def train(backbone, loader, dim=128):
    head = LaplaceHead(dim, 2).cuda()
    opt = torch.optim.AdamW([*backbone.parameters(), *head.parameters()], lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for x, target in loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = head(backbone(x.cuda()), target.cuda())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
