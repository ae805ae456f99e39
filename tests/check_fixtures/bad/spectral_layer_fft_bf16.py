import torch
from torch import nn


class SpectralConv(nn.Module):
    """Fourier layer of a neural operator."""

    def __init__(self, width=32, modes=16):
        super().__init__()
        self.modes = modes
        self.lift = nn.Conv1d(width, width, 1)
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)

    def forward(self, x):
        x = self.lift(x)
        spec = torch.fft.rfft(x, dim=-1)  # expect: NUM_UNSUPPORTED_OP
        low = torch.einsum("bim,iom->bom", spec[..., : self.modes], self.weight)
        out = torch.zeros_like(spec)
        out[..., : self.modes] = low
        return torch.fft.irfft(out, n=x.size(-1), dim=-1)


def train(loader):
    op = SpectralConv().cuda()
    opt = torch.optim.Adam(op.parameters(), lr=1e-3)
    for u0, u1 in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(op(u0.cuda()), u1.cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
