import torch
import torch.nn as nn
import torch.nn.functional as F


class ProcrustesAlign(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.left = nn.Linear(dim, dim, bias=False)
        self.right = nn.Linear(dim, dim, bias=False)

    def forward(self, a, b):
        cov = self.left(a).transpose(-2, -1) @ self.right(b)
        u, _, vh = torch.linalg.svd(cov, full_matrices=False)  # expect: NUM_UNSUPPORTED_OP
        return u @ vh


def train(loader, dim=64):
    net = ProcrustesAlign(dim).cuda()
    opt = torch.optim.Adam(net.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for a, b, rot in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.mse_loss(net(a.cuda(), b.cuda()), rot.cuda())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
