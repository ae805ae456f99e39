import torch
import torch.nn as nn


class Potential(nn.Module):
    """Energy model: forces are the negative gradient of the energy."""

    def __init__(self, width=128):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, pos):
        return self.net(pos).squeeze(-1)


class ForceTrainer:
    def __init__(self, lr=1e-3):
        self.model = Potential().cuda()
        self.opt = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)

    def forces(self, pos):
        with torch.autocast("cuda", dtype=torch.float16):
            energy = self.model(pos)
        total = self.scaler.scale(energy.float().sum())
        grad = torch.autograd.grad(total, pos, create_graph=True)[0]  # expect: SCALER_GRAD_PENALTY
        return energy, -grad

    def step(self, pos, energy, force):
        pos = pos.cuda().requires_grad_(True)
        self.opt.zero_grad(set_to_none=True)
        e, f = self.forces(pos)
        loss = nn.functional.mse_loss(e.float(), energy.cuda()) + 50 * nn.functional.mse_loss(f.float(), force.cuda())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()
