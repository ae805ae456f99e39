import torch
import torch.nn as nn
import torch.nn.functional as F


class Experts(nn.Module):
    def __init__(self, dim=128, n=4):
        super().__init__()
        self.router = nn.Linear(dim, n)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(n))

    def forward(self, x):
        choice = self.router(x).argmax(-1)
        out = torch.zeros(x.shape, device=x.device)
        for i, expert in enumerate(self.experts):
            rows = torch.nonzero(choice == i).squeeze(-1)
            out.index_add_(0, rows, expert(x[rows]))  # expect: NUM_INDEXED_WRITE
        return out


def train(loader, dim=128):
    net = Experts(dim).cuda()
    head = nn.Linear(dim, 10).cuda()
    opt = torch.optim.AdamW([*net.parameters(), *head.parameters()], lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(head(net(x.cuda())), y.cuda())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
