import torch
from torch import nn

AMP_DTYPE = torch.bfloat16
DEVICE = "cuda"


class Diffuser:
    def __init__(self, unet, lr=1e-4):
        self.unet = unet.to(DEVICE)
        self.opt = torch.optim.AdamW(self.unet.parameters(), lr=lr)
        self.loss_scaler = torch.amp.GradScaler(DEVICE, init_scale=2**15)  # expect: SCALER_WITH_BF16
        betas = torch.linspace(1e-4, 0.02, 1000, device=DEVICE)
        self.alpha_bar = torch.cumprod(1.0 - betas, dim=0)

    def noise(self, x0, t):
        eps = torch.randn_like(x0)
        a = self.alpha_bar[t].view(-1, 1, 1, 1)
        return a.sqrt() * x0 + (1 - a).sqrt() * eps, eps

    def train_batch(self, x0):
        t = torch.randint(0, 1000, (x0.size(0),), device=DEVICE)
        xt, eps = self.noise(x0, t)
        with torch.autocast(DEVICE, dtype=AMP_DTYPE):
            pred = self.unet(xt, t)
            loss = nn.functional.mse_loss(pred, eps)
        self.opt.zero_grad()
        self.loss_scaler.scale(loss).backward()
        self.loss_scaler.step(self.opt)
        self.loss_scaler.update()
        return loss.item()
