import torch
from diffusers import DDPMScheduler, UNet2DModel

torch.manual_seed(200)
unet = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=8,
                   block_out_channels=(16, 16), down_block_types=("DownBlock2D", "DownBlock2D"),
                   up_block_types=("UpBlock2D", "UpBlock2D"))
sched = DDPMScheduler(num_train_timesteps=200)
opt = torch.optim.AdamW(unet.parameters(), lr=2e-3)
r = torch.arange(8.0)
for step in range(24):
    c = torch.rand(16, 1, 1) * 8
    clean = (2 * torch.exp(-((r[None, None] - c) ** 2 + (r[None, :, None] - c) ** 2) / 6) - 1)[:, None]
    noise, t = torch.randn_like(clean), torch.randint(0, 200, (16,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = torch.nn.functional.mse_loss(unet(sched.add_noise(clean, noise, t), t).sample, noise)
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
    opt.step()
    if step % 6 == 0 or step == 23:
        print(step, loss.item())
