import torch
import torch.nn as nn


class Bank:
    def __init__(self, size, dim):
        self.features = torch.zeros(size, dim, device="cuda", dtype=torch.float32)
        self.filled = torch.zeros(size, dtype=torch.bool, device="cuda")

    @torch.no_grad()
    def write(self, slot, feats):
        self.features[slot] = feats  # expect: NUM_INDEXED_WRITE
        self.filled[slot] = True


class Encoder(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.fc = nn.Linear(512, dim)

    def forward(self, x):
        return self.fc(x)


@torch.no_grad()
def build(loader, size=10_000):
    enc, bank = Encoder().cuda().eval(), Bank(size, 64)
    for idx, x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            feats = enc(x.cuda())
        bank.write(idx.cuda(), feats)
    return bank
