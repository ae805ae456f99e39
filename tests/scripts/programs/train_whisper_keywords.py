"""Fine-tune a tiny Whisper on synthetic keyword clips (tones -> word ids)."""
import math
import random

import numpy as np
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

SEED = 11
random.seed(SEED)
np.random.seed(SEED)
torch.manual_seed(SEED)

N_MELS, FRAMES, N_FFT, HOP = 16, 40, 128, 64
VOCAB, BOS, EOS = 12, 1, 2


def mel_filters(n_bins, n_mels):
    edges = torch.linspace(0, n_bins - 1, n_mels + 2)
    k = torch.arange(n_bins).float()
    up = (k[None] - edges[:-2, None]) / (edges[1:-1, None] - edges[:-2, None])
    down = (edges[2:, None] - k[None]) / (edges[2:, None] - edges[1:-1, None])
    return torch.clamp(torch.minimum(up, down), min=0)


class LogMel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("fb", mel_filters(N_FFT // 2 + 1, N_MELS))
        self.register_buffer("win", torch.hann_window(N_FFT))

    def forward(self, wav):
        spec = torch.stft(wav, N_FFT, HOP, window=self.win, return_complex=True)
        power = (spec.abs() ** 2)[..., :FRAMES]
        mel = self.fb @ power
        logmel = torch.log10(mel + 1e-10)
        mean = logmel.mean((1, 2), keepdim=True)
        std = logmel.std((1, 2), keepdim=True)
        return (logmel - mean) / (std + 1e-3)


def make_batch(n):
    t = torch.arange(FRAMES * HOP) / 8000.0
    wavs, labels = [], []
    for _ in range(n):
        words = [random.randrange(3, VOCAB) for _ in range(2)]
        seg = torch.zeros(FRAMES * HOP)
        span = FRAMES * HOP // 2
        for i, w in enumerate(words):
            f = 200.0 + 280.0 * w
            a = i * span + random.randrange(0, 300)
            b = a + span - 900
            seg[a:b] = 0.3 * torch.sin(2 * math.pi * f * t[a:b])
        wavs.append(seg)
        labels.append(words + [EOS])
    return torch.stack(wavs), torch.tensor(labels)


cfg = WhisperConfig(
    vocab_size=VOCAB, num_mel_bins=N_MELS, d_model=32, encoder_layers=2, decoder_layers=2,
    encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
    max_source_positions=FRAMES // 2, max_target_positions=16, pad_token_id=0, bos_token_id=BOS,
    eos_token_id=EOS, decoder_start_token_id=BOS, dropout=0.0,
    suppress_tokens=None, begin_suppress_tokens=None,
)
model = WhisperForConditionalGeneration(cfg)
frontend = LogMel()
opt = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

model.train()
for step in range(70):
    wav, labels = make_batch(6)
    with torch.autocast("cpu", dtype=torch.float16):
        feats = frontend(wav)
        loss = model(input_features=feats, labels=labels).loss
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0 or step == 69:
        print(f"step {step:3d}  loss {loss.item():.4f}  scale {scaler.get_scale():.0f}")
