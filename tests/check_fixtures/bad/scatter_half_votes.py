import torch
import torch.nn as nn


class VoteNet(nn.Module):
    def __init__(self, dim=64, cells=1024):
        super().__init__()
        self.cells = cells
        self.fc = nn.Linear(dim, 1)

    def forward(self, points, cell):
        votes = self.fc(points).squeeze(-1)
        grid = torch.zeros(points.size(0), self.cells, device=points.device, dtype=torch.float)
        return grid.scatter_add_(1, cell, votes)  # expect: NUM_INDEXED_WRITE


def train(loader):
    net = VoteNet().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for points, cell, target in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(net(points.cuda(), cell.cuda()), target.cuda())
        loss.backward()
        opt.step()
