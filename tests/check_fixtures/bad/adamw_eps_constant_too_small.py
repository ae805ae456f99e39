import torch
import torch.nn as nn

ADAM_EPS = 1e-9


class Adapter(nn.Module):
    def __init__(self, width, bottleneck=16):
        super().__init__()
        self.down = nn.Linear(width, bottleneck, dtype=torch.half)  # expect: HALF_PARAMETERS
        self.up = nn.Linear(bottleneck, width, dtype=torch.half)  # expect: HALF_PARAMETERS

    def forward(self, h):
        return h + self.up(torch.relu(self.down(h)))


def train(features, targets, steps=300):
    adapter = Adapter(features.shape[-1]).cuda()
    opt = torch.optim.AdamW(adapter.parameters(), lr=5e-4, eps=ADAM_EPS)  # expect: HALF_ADAM_EPS
    for _ in range(steps):
        out = adapter(features)
        loss = nn.functional.l1_loss(out.float(), targets)
        opt.zero_grad()
        loss.backward()
        opt.step()
