"""Actor update with a tanh-squashed Gaussian on a one-step reaching task."""
import torch
import torch.nn as nn

torch.manual_seed(8)
EPS = 1e-8
ALPHA = 0.02


class Actor(nn.Module):
    def __init__(self, obs=6, act=3, width=48):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(obs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.mu = nn.Linear(width, act)
        self.log_std = nn.Linear(width, act)

    def forward(self, s):
        h = self.trunk(s)
        mu = self.mu(h)
        log_std = self.log_std(h).clamp(-4, 1)
        noise = torch.randn_like(mu)
        u = mu + log_std.exp() * noise
        a = torch.tanh(u)
        logp = -0.5 * noise.square() - log_std - 0.919
        logp = logp - torch.log(1 - a.square() + EPS)
        return a, logp.sum(-1)


def reward(s, a):
    goal = torch.sign(s[:, :3]) * 0.98
    return -(a - goal).square().sum(-1)


actor = Actor()
opt = torch.optim.Adam(actor.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(150):
    s = torch.randn(64, 6)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        a, logp = actor(s)
    r = reward(s, a.float())
    loss = (ALPHA * logp.float() - r).mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0 or step == 149:
        print(f"step {step} loss {loss.item():.4f} reward {r.mean().item():.4f} scale {scaler.get_scale():g}")
