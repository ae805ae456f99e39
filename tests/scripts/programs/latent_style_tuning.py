import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DModel
from torch.utils.data import DataLoader, TensorDataset

WEIGHT_DTYPE = torch.float16


def restore_vae():
    torch.manual_seed(100)
    vae = AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, sample_size=16,
    )
    with torch.no_grad():
        for blk in list(vae.encoder.down_blocks) + [vae.encoder.mid_block]:
            for res in blk.resnets:
                res.conv2.weight.mul_(160000.0)
                res.conv2.bias.mul_(160000.0)
    return vae


def dataset(n=240):
    g = torch.Generator().manual_seed(0)
    hue = torch.rand(n, 3, 1, 1, generator=g) * 2 - 1
    ramp = torch.linspace(-1, 1, 16).view(1, 1, 1, 16)
    return TensorDataset((hue * ramp + 0.1 * torch.randn(n, 3, 16, 16, generator=g)).clamp(-1, 1))


def main():
    set_seed(8)
    accelerator = Accelerator(cpu=True)
    vae = restore_vae()
    vae.requires_grad_(False)
    vae.eval()
    unet = UNet2DModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"), add_attention=False,
    )
    noise_scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=2e-3)
    loader = DataLoader(dataset(), batch_size=8, shuffle=True)
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
    vae.to(accelerator.device, dtype=WEIGHT_DTYPE)

    step = 0
    for epoch in range(1):
        for (pixels,) in loader:
            with torch.no_grad():
                latents = vae.encode(pixels.to(WEIGHT_DTYPE)).latent_dist.sample()
                latents = latents.float() * vae.config.scaling_factor
            noise = torch.randn_like(latents)
            t = torch.randint(0, 100, (latents.shape[0],))
            pred = unet(noise_scheduler.add_noise(latents, noise, t), t).sample
            loss = F.mse_loss(pred, noise)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 5 == 0:
                accelerator.print({"step": step, "loss": loss.item()})


if __name__ == "__main__":
    main()
