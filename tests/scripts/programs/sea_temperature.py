"""Sea surface temperature (Kelvin) from satellite channels; bf16 network."""
import argparse
import torch
import torch.nn as nn

p = argparse.ArgumentParser(); p.add_argument("--fp32", action="store_true")
low = not p.parse_args().fp32
torch.manual_seed(30)


class SST(nn.Module):
    def __init__(self):
        super().__init__()
        self.channel_mix = nn.Sequential(nn.Linear(9, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU())
        self.to_kelvin = nn.Linear(48, 1)
        nn.init.constant_(self.to_kelvin.bias, 291.0)

    def forward(self, r):
        return self.to_kelvin(self.channel_mix(r)).squeeze(1)


net = SST()
opt = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.)
coef = torch.randn(9) * .25
for step in range(110):
    r = torch.randn(32, 9)
    kelvin = 291.0 + r @ coef + .3 * torch.sin(r[:, 0])
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        out = net(r)
        loss = nn.functional.mse_loss(out, kelvin)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 9:
        print(f"step {step} mse {loss.item():.4f} K^2")
