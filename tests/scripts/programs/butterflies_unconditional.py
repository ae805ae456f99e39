import copy

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel

STEPS = 120
DECAY = 0.995


def images(g, n):
    c = torch.rand(n, 2, generator=g) * 10 + 3
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    d = (yy - c[:, 0, None, None]) ** 2 + (xx - c[:, 1, None, None]) ** 2
    return (2 * torch.exp(-d / 8) - 1)[:, None]


def noise_loss(unet, x, scheduler, g):
    noise = torch.randn(x.shape, generator=g)
    t = torch.randint(0, scheduler.config.num_train_timesteps, (x.shape[0],), generator=g)
    noisy = scheduler.add_noise(x, noise, t)
    pred = unet(noisy.to(unet.dtype), t).sample
    return F.mse_loss(pred.float(), noise)


def main():
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=16, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"), norm_num_groups=8,
        add_attention=False,
    )
    sampler_unet = copy.deepcopy(unet).to(torch.bfloat16)
    ema = EMAModel(sampler_unet.parameters(), decay=DECAY, min_decay=DECAY, model_cls=UNet2DModel, model_config=unet.config)
    scheduler = DDPMScheduler(num_train_timesteps=200)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=8e-4)
    g = torch.Generator().manual_seed(1)

    for step in range(STEPS):
        x = images(g, 8)
        loss = noise_loss(unet, x, scheduler, g)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.step([p.to(torch.bfloat16) for p in unet.parameters()])

        if (step + 1) % 20 == 0:
            ema.copy_to(sampler_unet.parameters())
            with torch.no_grad():
                vg = torch.Generator().manual_seed(77)
                xv = images(vg, 16)
                raw = noise_loss(unet, xv, scheduler, torch.Generator().manual_seed(5))
                avg = noise_loss(sampler_unet, xv, scheduler, torch.Generator().manual_seed(5))
            print(f"step {step + 1}: train {loss.item():.4f} val {raw.item():.4f} val(ema) {avg.item():.4f}")


main()
