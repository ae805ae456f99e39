import torch
from torch import nn


class Enhancer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 32, 15, padding=7), nn.PReLU(), nn.Conv1d(32, 1, 15, padding=7))

    def forward(self, wav):
        return wav + self.net(wav)


def finetune(loader, lr=1e-4):
    model = Enhancer().cuda()
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    l1 = nn.L1Loss()
    for noisy, clean in loader:
        noisy, clean = noisy.cuda(), clean.cuda()
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):  # expect: REGION_DEVICE
            loss = l1(model(noisy), clean)
        opt.zero_grad()
        loss.backward()
        opt.step()
