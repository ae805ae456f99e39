"""Pairwise preference loss."""
import torch
import torch.nn as nn


class Reward(nn.Module):
    def __init__(self, encoder, dim):
        super().__init__()
        self.encoder = encoder
        self.value = nn.Linear(dim, 1)

    def forward(self, ids):
        return self.value(self.encoder(ids)).squeeze(-1)


def preference_loss(chosen, rejected):
    return -torch.log(torch.sigmoid(chosen - rejected)).mean()  # expect: NUM_LOG_OF_SIGMOID


def train(model, loader):
    model = model.cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler("cuda")
    for good, bad in loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = preference_loss(model(good.cuda()), model(bad.cuda()))
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
