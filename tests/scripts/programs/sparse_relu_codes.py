import torch
import torch.nn as nn
import torch.nn.functional as F


def count_parameters(module):
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


class SparseAE(nn.Module):
    def __init__(self, d=24, codes=64):
        super().__init__()
        self.enc = nn.Linear(d, codes)
        self.dec = nn.Linear(codes, d, bias=False)
        nn.init.constant_(self.enc.bias, -0.3)

    def forward(self, x):
        z = F.relu(self.enc(x))
        return self.dec(z), z


def main():
    torch.manual_seed(5)
    atoms = F.normalize(torch.randn(32, 24), dim=1)
    model = SparseAE()
    print("parameters", count_parameters(model))
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for step in range(300):
        coef = torch.rand(64, 32) * (torch.rand(64, 32) < 0.1) * 3
        x = coef @ atoms
        rec, z = model(x)
        mse = F.mse_loss(rec, x)
        loss = mse + 1e-3 * z.abs().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 30 == 0:
            print(f"step {step} mse {mse.item():.5f} active {(z > 0).float().mean().item():.3f}")


main()
