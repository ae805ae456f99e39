"""The FFT is taken of the fp32 input, before any autocast op touches it."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class SpectralFeatures(nn.Module):
    def __init__(self, n_fft=512, classes=10):
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft))
        self.net = nn.Sequential(nn.Conv1d(n_fft // 2 + 1, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.fc = nn.Linear(64, classes)

    def forward(self, wav):
        spec = torch.stft(wav.float(), self.n_fft, window=self.window, return_complex=True)
        mag = torch.log1p(spec.abs())
        return self.fc(self.net(mag))


def train(loader):
    net = SpectralFeatures().cuda()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for wav, y in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(wav.cuda()), y.cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
