"""Regress mechanical strain (dimensionless, order 1e-4) from small sensor images with a ViT."""
import torch
from torch import nn
from transformers import ViTConfig, ViTModel

torch.manual_seed(11)
STEPS = 50
cfg = ViTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
                image_size=32, patch_size=8, num_channels=1, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0)


class StrainNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = ViTModel(cfg, add_pooling_layer=False)
        self.head = nn.Linear(64, 6)

    def forward(self, img):
        return self.head(self.encoder(img).last_hidden_state.mean(1)) * 1e-3


def batch(gen):
    amp = torch.randn(16, 6, generator=gen)
    yy = torch.linspace(0, 6.28, 32)
    waves = torch.stack([torch.sin(yy * (k + 1)) for k in range(6)])
    img = (amp @ waves)[:, None, None, :].expand(16, 1, 32, 32) + 0.1 * torch.randn(16, 1, 32, 32, generator=gen)
    return img.contiguous(), amp * 2e-4          # strain in m/m


net = StrainNet()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
gen = torch.Generator().manual_seed(5)
for step in range(STEPS):
    img, strain = batch(gen)
    with torch.autocast("cpu", dtype=torch.float16):
        pred = net(img)
        loss = nn.functional.mse_loss(pred, strain)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 0 or step == STEPS - 1:
        print(f"step {step} loss {loss.item() / 4e-8:.4f} (relative)")
