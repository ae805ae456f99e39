import torch
from torch import nn
from diffusers import DDPMScheduler
from diffusers.training_utils import EMAModel

torch.manual_seed(2)
T = 200
sched = DDPMScheduler(num_train_timesteps=T, beta_schedule="squaredcos_cap_v2")


class Denoiser(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.t = nn.Embedding(T, d)
        self.inp = nn.Linear(2, d)
        self.mid = nn.Linear(d, d)
        self.out = nn.Linear(d, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x, t):
        h = nn.functional.silu(self.inp(x) + self.t(t))
        return self.out(nn.functional.silu(self.mid(h)))


model = Denoiser()
opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
ema = EMAModel(model.parameters(), decay=0.98)


def loss_on(n):
    ang = torch.rand(n) * 6.2832
    x0 = 1.5 * torch.stack([ang.cos(), ang.sin()], 1)
    noise, t = torch.randn_like(x0), torch.randint(0, T, (n,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(sched.add_noise(x0, noise, t), t)
    return nn.functional.mse_loss(pred.float(), noise)


for step in range(200):
    loss = loss_on(32)
    opt.zero_grad()
    loss.backward()
    opt.step()
    ema.step(model.parameters())
    if step % 20 == 0 or step == 199:
        print(f"step {step} loss {loss.item():.4f}")
ema.store(model.parameters())
ema.copy_to(model.parameters())
with torch.no_grad():
    print("averaged eval", loss_on(2000).item())
ema.restore(model.parameters())
