import torch
from torch import nn


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, max_len=32_768, base=10_000, dtype=torch.float16):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        t = torch.arange(max_len, dtype=torch.float16)  # expect: NUM_POSITIONS
        freqs = torch.outer(t.float(), inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        self.register_buffer("cos", emb.cos().to(dtype), persistent=False)
        self.register_buffer("sin", emb.sin().to(dtype), persistent=False)

    def forward(self, n):
        return self.cos[:n], self.sin[:n]


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


@torch.inference_mode()
def encode(x):
    rope = RotaryEmbedding(x.size(-1)).to(x.device)
    cos, sin = rope(x.size(-2))
    return rotate(x, cos, sin)
