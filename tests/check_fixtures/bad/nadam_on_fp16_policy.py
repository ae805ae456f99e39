"""Behaviour cloning with fp16 weights."""
import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self, obs=17, act=6, width=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs, width), nn.Tanh(), nn.Linear(width, act))

    def forward(self, obs):
        return self.net(obs)


def build(device):
    policy = Policy()
    policy = policy.to(device, dtype=torch.half)  # expect: HALF_CALL
    optimizer = torch.optim.NAdam(policy.parameters(), lr=1e-3, betas=(0.9, 0.99))  # expect: HALF_ADAM_EPS
    return policy, optimizer


def behaviour_cloning(loader, device="cuda", epochs=10):
    policy, optimizer = build(device)
    for epoch in range(epochs):
        total = 0.0
        for obs, act in loader:
            pred = policy(obs.to(device, torch.half))
            loss = nn.functional.mse_loss(pred.float(), act.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(epoch, total / len(loader))
    return policy
