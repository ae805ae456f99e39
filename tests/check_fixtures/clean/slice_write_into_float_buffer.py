"""Slices and integer rows copy with a cast; only tensor indices need equal dtypes."""
import torch
from torch import nn


class KVCache:
    def __init__(self, layers, length, dim):
        self.k = torch.zeros(layers, length, dim, device="cuda")
        self.v = torch.zeros(layers, length, dim, device="cuda")

    def append(self, layer, pos, k, v):
        self.k[layer, pos : pos + k.size(0)] = k
        self.v[layer, pos : pos + v.size(0)] = v


@torch.inference_mode()
def prefill(proj: nn.Linear, tokens, layers=4):
    cache = KVCache(layers, 1024, proj.out_features // 2)
    with torch.autocast("cuda", dtype=torch.float16):
        for layer in range(layers):
            k, v = proj(tokens.cuda()).chunk(2, dim=-1)
            cache.append(layer, 0, k, v)
    return cache
