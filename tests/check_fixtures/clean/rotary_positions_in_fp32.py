import torch
import torch.nn as nn


class Rotary(nn.Module):
    def __init__(self, dim, base=10_000.0):
        super().__init__()
        inv = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        self.register_buffer("inv_freq", inv, persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        with torch.autocast("cuda", enabled=False):
            angles = position_ids[..., None].float() * self.inv_freq.float()
            emb = torch.cat((angles, angles), dim=-1)
            return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary(q, k, cos, sin):
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


@torch.inference_mode()
def demo():
    rope = Rotary(64).cuda()
    q = torch.randn(1, 8, 4096, 64, device="cuda", dtype=torch.bfloat16)
    cos, sin = rope(q, torch.arange(4096, device="cuda")[None])
    return apply_rotary(q, q, cos, sin)
