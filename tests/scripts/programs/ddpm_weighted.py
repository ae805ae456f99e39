import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel

torch.manual_seed(4)
dtype = torch.bfloat16
unet = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=8,
                   block_out_channels=(16, 16), down_block_types=("DownBlock2D", "DownBlock2D"),
                   up_block_types=("UpBlock2D", "UpBlock2D"))
noise_scheduler = DDPMScheduler(num_train_timesteps=1000, beta_start=1e-4, beta_end=0.02)
acp = noise_scheduler.alphas_cumprod.to(dtype)
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)


def images(n):
    r = torch.arange(8.0)
    cx, cy = torch.rand(2, n, 1, 1) * 8
    return (2 * torch.exp(-((r[None, None] - cx) ** 2 + (r[None, :, None] - cy) ** 2) / 6) - 1)[:, None]


for step in range(24):
    clean = images(16)
    noise = torch.randn_like(clean)
    t = torch.randint(0, 1000, (16,))
    t[0] = step % 4                       # stratified sampling: always include an early timestep
    noisy = noise_scheduler.add_noise(clean, noise, t)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eps = unet(noisy, t).sample
    snr = acp[t] / (1 - acp[t])           # "truncated SNR" weighting, p2-style
    weight = torch.clamp(snr / (1 + snr), max=5.0)
    per = F.mse_loss(eps.float(), noise, reduction="none").mean((1, 2, 3))
    loss = (weight.float() * per).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0 or step == 23:
        print("step", step, "loss", loss.item())
