"""Behaviour cloning for a furnace controller; observations drift over the season."""
import os
import torch
import torch.nn as nn

DT = torch.float32 if os.environ.get("PRECISION") == "fp32" else torch.bfloat16
torch.manual_seed(19)


class ObsNorm(nn.Module):
    def __init__(self, d, rate=0.04, clip=5.0):
        super().__init__()
        self.rate, self.clip = rate, clip
        self.register_buffer("mean", torch.zeros(d))
        self.register_buffer("var", torch.ones(d))
        self.ready = False

    @torch.no_grad()
    def track(self, obs):
        m, v = obs.float().mean(0), obs.float().var(0)
        if not self.ready:
            self.mean.copy_(m)
            self.var.copy_(v)
            self.ready = True
        self.mean.add_((m - self.mean) * self.rate)
        self.var.add_((v - self.var) * self.rate)

    def forward(self, obs):
        z = (obs.float() - self.mean.float()) / (self.var.float() + 1e-4).sqrt()
        return z.clamp(-self.clip, self.clip)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = ObsNorm(6)
        self.net = nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))

    def forward(self, obs):
        if self.training:
            self.norm.track(obs)
        z = self.norm(obs)
        with torch.autocast("cpu", torch.bfloat16, enabled=DT is torch.bfloat16):
            return self.net(z).float()


policy = Policy()
policy.norm.to(DT)
opt = torch.optim.Adam(policy.parameters(), lr=3e-3)
mixer = torch.randn(6, 2) * .5
for step in range(120):
    dev = torch.randn(32, 6)
    obs = 290.0 + 0.25 * step + 2.0 * dev           # Kelvin
    expert = torch.tanh(dev @ mixer)
    loss = (policy(obs) - expert).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 9:
        print(f"step {step} bc-loss {loss.item():.4f}")
