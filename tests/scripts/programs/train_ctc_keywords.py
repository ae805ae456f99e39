"""Keyword spotting with a small GRU and CTC on synthetic 16-bit audio."""
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(11)
rng = np.random.default_rng(11)
SR, HOP, NFFT, VOCAB = 4000, 64, 128, 6


def synth(n_words):
    labels = rng.integers(1, VOCAB, size=n_words)
    wave = []
    for k in labels:
        t = np.arange(320) / SR
        wave.append(np.sin(2 * math.pi * (150 + 260 * k) * t) * np.hanning(320))
        wave.append(np.zeros(128))
    wave = np.concatenate(wave)
    wave = wave * 9000 + rng.normal(size=wave.shape) * 60
    return torch.tensor(wave.round(), dtype=torch.float32), torch.tensor(labels)


class LogMel(nn.Module):
    def __init__(self, n_mels=20):
        super().__init__()
        fb = torch.zeros(n_mels, NFFT // 2 + 1)
        centers = torch.linspace(1, NFFT // 2 - 1, n_mels)
        for i, c in enumerate(centers):
            fb[i] = (1 - (torch.arange(NFFT // 2 + 1) - c).abs() / 3.5).clamp(min=0)
        self.register_buffer("fb", fb)
        self.register_buffer("win", torch.hann_window(NFFT))

    def forward(self, wav):
        frames = (wav / 32768).unfold(-1, NFFT, HOP) * self.win
        mag = torch.fft.rfft(frames).abs() * 32768 / NFFT
        mel = F.linear(mag.square(), self.fb)
        return torch.log(mel + 1.0) / 10


class KWS(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = LogMel()
        self.proj = nn.Linear(20, 32)
        self.rnn = nn.GRU(32, 32, batch_first=True, bidirectional=True)
        self.out = nn.Linear(64, VOCAB)

    def forward(self, wav):
        x = F.relu(self.proj(self.front(wav)))
        x, _ = self.rnn(x)
        return self.out(x)


model = KWS()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(60):
    wavs, labs = zip(*[synth(3) for _ in range(8)])
    wav, lab = torch.stack(wavs), torch.stack(labs)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(wav)
    logp = logits.float().log_softmax(-1).transpose(0, 1)
    ilen = torch.full((8,), logp.size(0))
    loss = F.ctc_loss(logp, lab, ilen, torch.full((8,), 3))
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0 or step == 59:
        print(f"step {step} ctc {loss.item():.4f} scale {scaler.get_scale():.3g}")
