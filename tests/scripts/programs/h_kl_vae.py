import torch
from diffusers import AutoencoderKL

torch.manual_seed(33)
vae = AutoencoderKL(in_channels=1, out_channels=1, block_out_channels=(16,), latent_channels=2, norm_num_groups=8,
                    down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",), layers_per_block=1,
                    mid_block_add_attention=False)
optimizer = torch.optim.AdamW(vae.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1000)


def radar(n=8):
    t = torch.arange(12.0)
    f = torch.rand(n, 1, 1) * 2
    return 30.0 * torch.sin(f * t[None, None] + 0.3 * t[None, :, None])[:, None]


for step in range(20):
    x = radar()
    with torch.autocast("cpu", dtype=torch.float16):
        post = vae.encode(x).latent_dist
        rec = vae.decode(post.sample()).sample
        rec_loss = ((rec.float() - x) ** 2).sum()
        kl = post.kl().sum()
    loss = (rec_loss + 1e-3 * kl) / x.numel()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 4 == 0 or step == 19:
        print(step, loss.item(), scaler.get_scale())
