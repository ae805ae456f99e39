import torch
from torch import nn
from diffusers import DDPMScheduler
from diffusers.training_utils import EMAModel

torch.manual_seed(4)
T = 100
sched = DDPMScheduler(num_train_timesteps=T, beta_schedule="squaredcos_cap_v2")


class Net(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.t = nn.Embedding(T, d)
        self.inp = nn.Linear(8, d)
        self.mid = nn.Linear(d, d)
        self.out = nn.Linear(d, 8)

    def forward(self, x, t):
        h = torch.nn.functional.silu(self.inp(x) + self.t(t))
        return self.out(torch.nn.functional.silu(self.mid(h)))


def data(n):
    z = torch.randn(n, 2)
    return torch.cat([z, z, -z, z * 0.5], 1)


model = Net().to(torch.bfloat16)
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
ema = EMAModel(model.parameters(), decay=0.995, min_decay=0.995)


def loss_fn(x0):
    noise = torch.randn_like(x0)
    t = torch.randint(0, T, (x0.shape[0],))
    xt = sched.add_noise(x0, noise, t)
    pred = model(xt.to(torch.bfloat16), t)
    return nn.functional.mse_loss(pred.float(), noise)


for step in range(400):
    loss = loss_fn(data(32))
    opt.zero_grad()
    loss.backward()
    opt.step()
    ema.step(model.parameters())
    if step % 50 == 0 or step == 399:
        print(f"step {step} loss {loss.item():.4f}")

ema.store(model.parameters())
with torch.no_grad():
    torch.manual_seed(99)
    raw = loss_fn(data(1024))
    ema.copy_to(model.parameters())
    torch.manual_seed(99)
    avg = loss_fn(data(1024))
print(f"eval loss weights {raw.item():.4f} averaged {avg.item():.4f}")
