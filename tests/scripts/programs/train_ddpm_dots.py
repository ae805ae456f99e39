import torch
import torch.nn.functional as F
from diffusers import UNet2DModel

torch.manual_seed(0)
dtype = torch.bfloat16

T = 1000
betas = torch.linspace(1e-4, 0.02, T, dtype=dtype)
alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
signal = alphas_cumprod.sqrt()
sigma = (1.0 - alphas_cumprod).sqrt()

model = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, layers_per_block=1,
                    block_out_channels=(16, 32), norm_num_groups=4,
                    down_block_types=("DownBlock2D", "DownBlock2D"),
                    up_block_types=("UpBlock2D", "UpBlock2D"))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)


def images(n):
    x = -torch.ones(n, 1, 8, 8)
    c = torch.randint(1, 6, (n, 2))
    for i in range(n):
        x[i, 0, c[i, 0]:c[i, 0] + 2, c[i, 1]:c[i, 1] + 2] = 1.0
    return x


hist = []
for step in range(150):
    x0 = images(8)
    t = torch.randint(0, T, (8,))
    eps = torch.randn_like(x0)
    x_t = signal[t].view(-1, 1, 1, 1) * x0 + sigma[t].view(-1, 1, 1, 1) * eps
    with torch.autocast("cpu", dtype=dtype):
        pred = model(x_t, t).sample
    loss = F.mse_loss(pred.float(), eps)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    hist.append(loss.item())
    if (step + 1) % 25 == 0:
        print(f"step {step + 1} loss {sum(hist[-25:]) / 25:.4f}")
