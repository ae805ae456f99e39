import torch
from torch import nn
from diffusers import DDPMScheduler

torch.manual_seed(0)
sched = DDPMScheduler(num_train_timesteps=200, beta_schedule="linear", prediction_type="epsilon",
                      rescale_betas_zero_snr=True)


class Denoiser(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.t = nn.Embedding(200, d)
        self.inp = nn.Linear(2, d)
        self.net = nn.Sequential(nn.SiLU(), nn.Linear(d, d), nn.SiLU(), nn.Linear(d, 2))

    def forward(self, x, t):
        return self.net(self.inp(x) + self.t(t))


def compute_snr(t):
    a = sched.alphas_cumprod[t]
    return a / (1 - a)


model = Denoiser()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(150):
    ang = torch.rand(16) * 6.2832
    x0 = torch.stack([ang.cos(), ang.sin()], 1)
    noise = torch.randn_like(x0)
    t = torch.randint(0, 200, (16,))
    xt = sched.add_noise(x0, noise, t)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(xt, t)
    snr = compute_snr(t)
    weight = torch.stack([snr, 5.0 * torch.ones_like(snr)], 1).min(1)[0] / snr
    loss = ((pred.float() - noise) ** 2).mean(1) * weight
    loss = loss.mean()
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if step % 15 == 0 or step == 149:
        print(f"step {step} loss {loss.item():.4f}")
