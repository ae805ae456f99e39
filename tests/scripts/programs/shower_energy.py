# Deep-set regression of the total energy in a calorimeter shower (hits in MeV).
import sys
import torch
import torch.nn as nn

fp32 = "--fp32" in sys.argv
torch.manual_seed(0)
HITS = 256


class PhiRho(nn.Module):
    def __init__(self, w=24):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(4, w), nn.ReLU(), nn.Linear(w, w), nn.Softplus())
        self.rho = nn.Sequential(nn.Linear(w, w), nn.Tanh(), nn.Linear(w, 1))

    def forward(self, pos, energy):
        h = self.phi(torch.cat([pos, energy.log1p()[..., None]], -1))
        pooled = (h * energy[..., None]).sum(dim=1)
        return self.rho(torch.log1p(pooled) - 10.0).squeeze(-1)


def make(n):
    incident = torch.rand(n) * 4 + 8.0            # log energy
    pos = torch.randn(n, HITS, 3)
    share = torch.softmax(torch.randn(n, HITS) * .5, 1)
    return pos, share * incident.exp()[:, None], (incident - 10.0)


model = PhiRho()
optim = torch.optim.Adam(model.parameters(), 3e-3)
scaler = torch.amp.GradScaler("cpu", enabled=not fp32)
hist = []
for step in range(80):
    pos, e, t = make(12)
    optim.zero_grad()
    with torch.autocast("cpu", torch.float16, enabled=not fp32):
        e_in = e if fp32 else e.half()
        pred = model(pos, e_in)
        loss = nn.functional.mse_loss(pred, t)
    scaler.scale(loss).backward()
    scaler.step(optim)
    scaler.update()
    hist.append(loss.item())
    print(step, "mse", round(hist[-1], 4), "scale", scaler.get_scale())
