"""Vector quantiser with an EMA codebook; cluster sizes live in fp16."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class EMAQuantizer(nn.Module):
    def __init__(self, codes=512, dim=64, decay=0.99):
        super().__init__()
        self.decay = decay
        self.register_buffer("codebook", torch.randn(codes, dim))
        self.register_buffer("cluster_size", torch.zeros(codes, dtype=torch.float16))
        self.register_buffer("embed_sum", torch.zeros(codes, dim))

    @torch.no_grad()
    def update(self, flat, assign):
        onehot = F.one_hot(assign, self.codebook.size(0)).float()
        self.cluster_size.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)  # expect: HALF_ACCUMULATOR
        self.embed_sum.mul_(self.decay).add_(onehot.t() @ flat, alpha=1 - self.decay)
        denom = self.cluster_size.float().clamp(min=1e-3)
        self.codebook.copy_(self.embed_sum / denom[:, None])

    def forward(self, z):
        flat = z.float()
        assign = torch.cdist(flat, self.codebook).argmin(-1)
        quantised = self.codebook[assign]
        if self.training:
            self.update(flat, assign)
        commit = F.mse_loss(flat, quantised.detach())
        return z + (quantised - flat).detach(), commit
