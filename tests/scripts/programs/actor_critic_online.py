import torch
import torch.nn as nn

torch.manual_seed(36)
actor = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
opt_a = torch.optim.Adam(actor.parameters(), lr=2e-3)
opt_c = torch.optim.Adam(critic.parameters(), lr=5e-3)


def env_step(s, a):
    v = s[1] + (0.1 if a == 1 else -0.1)
    p = s[0] + v
    return torch.stack([p, v * 0.9, s[2] * 0.99]), -float(p.abs())


s = torch.tensor([0.5, 0.0, 1.0])
for t in range(240):
    dist = torch.distributions.Categorical(logits=actor(s))
    a = dist.sample()
    s2, r = env_step(s, a.item())
    done = s2[0].abs() > 2
    v = critic(s)
    with torch.no_grad():
        tgt = r + 0.95 * critic(s2) * (0.0 if done else 1.0)
    adv = (tgt - v).detach()
    opt_c.zero_grad()
    (tgt - v).pow(2).mean().backward()
    opt_c.step()
    opt_a.zero_grad()
    (-dist.log_prob(a) * adv.squeeze() - 0.01 * dist.entropy()).backward()
    opt_a.step()
    s = torch.tensor([0.5, 0.0, 1.0]) * torch.randn(()).sign() if done else s2
print("value", v.item())
