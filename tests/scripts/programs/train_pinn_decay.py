"""Physics-informed net for u' = -2u, u(0) = 1, derivatives by autograd in full precision."""
import torch
import torch.nn as nn

torch.manual_seed(25)


class U(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.obs_noise = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, t):
        return self.f(t)


net = U()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for step in range(200):
    t = (torch.rand(48, 1) * 2).requires_grad_(True)
    with torch.autocast("cpu", enabled=False):
        u = net(t)
        du, = torch.autograd.grad(u.sum(), t, create_graph=True)
        phys = (du + 2 * u).square().mean()
        ic = (net(torch.zeros(1, 1)) - 1).square().mean()
    to = torch.rand(32, 1) * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        drift = net.obs_noise(to)
    data = (drift.float() - 0.3 * torch.sin(3 * to) - 0.02 * torch.randn(32, 1)).square().mean()
    loss = phys + 10 * ic + data
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 0 or step == 199:
        with torch.no_grad():
            g = torch.linspace(0, 2, 50).unsqueeze(1)
            err = (net(g) - torch.exp(-2 * g)).abs().max().item()
        print(f"step {step} loss {loss.item():.5f} max err {err:.4f} drift {data.item():.4f}")
