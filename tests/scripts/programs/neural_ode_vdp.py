import torch
from torch import nn

SEED = 123


def seed_everything(seed):
    torch.manual_seed(seed)


def field(s):
    x, v = s[:, 0], s[:, 1]
    return torch.stack([v, 1.2 * (1 - x ** 2) * v - x], 1)


def simulate(s, steps=8, dt=0.1):
    out = [s]
    for _ in range(steps):
        k1 = field(s)
        k2 = field(s + 0.5 * dt * k1)
        s = s + dt * k2
        out.append(s)
    return torch.stack(out, 1)


class LearnedField(nn.Module):
    def __init__(self, h=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, 2))

    def forward(self, s):
        return self.net(s)


class Integrator(nn.Module):
    def __init__(self, f, dt=0.1):
        super().__init__()
        self.f, self.dt = f, dt

    def forward(self, s, steps):
        out = [s]
        for _ in range(steps):
            s = s + self.dt * self.f(s + 0.5 * self.dt * self.f(s))
            out.append(s)
        return torch.stack(out, 1)


def sample_trajectories(n):
    seed_everything(SEED)
    start = torch.randn(n, 2) * 1.5
    return simulate(start)


def fit(model, iters=120):
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, iters)
    for it in range(iters):
        traj = sample_trajectories(4)
        pred = model(traj[:, 0], 8)
        loss = (pred - traj).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if it % 20 == 0:
            print(f"iter {it:4d}  loss {loss.item():.6f}")


seed_everything(SEED)
model = Integrator(LearnedField())
fit(model)
fresh = simulate(torch.empty(200, 2).uniform_(-3, 3))
with torch.no_grad():
    print("fresh mse", (model(fresh[:, 0], 8) - fresh).pow(2).mean().item())
