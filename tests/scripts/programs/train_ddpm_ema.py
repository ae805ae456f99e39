"""Unconditional DDPM on toy 8x8 blobs; samples are drawn from the averaged weights."""
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel

torch.manual_seed(17)
S = 8


def blobs(n):
    c = torch.rand(n, 2) * 4 + 2
    g = torch.arange(S).float()
    d = (g[None, :, None] - c[:, 0, None, None]) ** 2 + (g[None, None] - c[:, 1, None, None]) ** 2
    return (torch.exp(-d / 3.0) * 2 - 1)[:, None]


unet = UNet2DModel(
    sample_size=S, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(16,),
    down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",), norm_num_groups=4,
    add_attention=False,
).to(torch.bfloat16)
ema = EMAModel(unet.parameters(), decay=0.993, min_decay=0.993, update_after_step=0)
sched = DDPMScheduler(num_train_timesteps=100)
opt = torch.optim.AdamW(unet.parameters(), lr=1.5e-3, eps=1e-6)


@torch.no_grad()
def validate():
    g = torch.Generator().manual_seed(0)
    x = val
    losses = []
    for t in (10, 40, 80):
        noise = torch.randn(x.shape, generator=g)
        tt = torch.full((len(x),), t)
        pred = unet(sched.add_noise(x, noise, tt).bfloat16(), tt).sample
        losses.append(F.mse_loss(pred.float(), noise).item())
    return sum(losses) / 3


val = blobs(8)
for step in range(200):
    x = blobs(8)
    noise = torch.randn_like(x)
    t = torch.randint(0, 100, (8,))
    pred = unet(sched.add_noise(x, noise, t).bfloat16(), t).sample
    loss = F.mse_loss(pred.float(), noise)
    opt.zero_grad()
    loss.backward()
    opt.step()
    ema.step(unet.parameters())
    if step % 40 == 0 or step == 199:
        live = validate()
        ema.store(unet.parameters())
        ema.copy_to(unet.parameters())
        avg = validate()
        ema.restore(unet.parameters())
        print(f"step {step} loss {loss.item():.4f} val {live:.4f} val_ema {avg:.4f}")
