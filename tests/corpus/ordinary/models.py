"""Healthy models that look suspicious: masks of -inf, dead-looking branches, outliers, missing labels."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from corpus import Training, healthy
from corpus.draws import noise
from corpus.loops import usual


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(w // self.heads)
        return self.proj((scores.masked_fill(mask, float("-inf")).softmax(-1) @ v).transpose(1, 2).reshape(b, t, w))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, 2)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width))

    def forward(self, x, mask):
        x = x + self.attn(self.ln1(x), mask)
        return x + self.mlp(self.ln2(x))


class Lm(nn.Module):
    """A causal language model with tied weights; `cheap` recomputes its blocks in the backward."""

    def __init__(self, vocabulary: int = 32, width: int = 24, dropout: float = 0.0, cheap: bool = False) -> None:
        super().__init__()
        self.cheap = cheap
        self.token = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.token.weight, std=0.1)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids):
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        x = self.token(ids)
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False) if self.cheap else block(x, mask)
        return self.head(self.norm(x))


def sentences(i: int, vocabulary: int = 32) -> tuple[torch.Tensor]:
    return ((torch.arange(11) * 3 + (noise(8, 1, key=(81, i)).abs() * 12).long()) % vocabulary,)


def next_token(model: nn.Module):
    def loss_of(ids):
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return loss_of


def causal_mask_of_minus_infinity(dtype: torch.dtype = torch.float16) -> Training:
    """Half of all scores are -inf; every row keeps at least its own token."""
    model = Lm()
    return usual(model, torch.optim.AdamW(model.parameters(), lr=5e-3), sentences, next_token(model), dtype, clip=1.0)


def checkpointed_blocks_with_dropout(dtype: torch.dtype = torch.bfloat16) -> Training:
    model = Lm(dropout=0.2, cheap=True)
    return usual(model, torch.optim.AdamW(model.parameters(), lr=5e-3), sentences, next_token(model), dtype)


def large_vocabulary_of_which_few_appear(dtype: torch.dtype = torch.float16) -> Training:
    """2,000 words, some 30 of them in a batch: most rows of the table have a gradient of exactly zero."""
    model = Lm(vocabulary=2000, width=16)
    model.head = nn.Linear(16, 32)

    def loss_of(ids):
        return F.cross_entropy(model(ids[:, :-1] * 60).flatten(0, 1), ids[:, 1:].flatten())

    return usual(model, torch.optim.Adam(model.parameters(), lr=5e-3), sentences, loss_of, dtype)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3, padding=1))
        self.backbone.requires_grad_(False).eval()
        self.head = nn.Linear(12, 6)
        self.spare = nn.Linear(12, 2)

    def train(self, mode: bool = True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        return self.head(self.backbone(x).relu().mean((2, 3)))


def pictures(i: int, classes: int = 6, rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    label = (torch.arange(rows) + i) % classes
    return noise(rows, 3, 8, 8, key=(82, i)) * 0.5 + (label[:, None, None, None] - classes / 2) * 0.5, label


def classify(model: nn.Module, **options):
    def loss_of(x, label):
        return F.cross_entropy(model(x), label, **options)

    return loss_of


def frozen_backbone_and_an_unused_head(dtype: torch.dtype = torch.float16) -> Training:
    model = Adapted()
    trained = [p for p in model.parameters() if p.requires_grad]
    return usual(model, torch.optim.SGD(trained, lr=0.1, momentum=0.9), pictures, classify(model), dtype)


class ZeroGate(nn.Module):
    """A branch that begins as nothing: its inner layers have gradients of exactly zero at the first step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


def branches_that_begin_at_zero(dtype: torch.dtype = torch.bfloat16) -> Training:
    model = nn.Sequential(nn.Linear(10, 24), ZeroGate(24), ZeroGate(24), ZeroGate(24), nn.Linear(24, 3))

    def data(i):
        x = noise(24, 10, key=(83, i))
        return x, x[:, :3].argmax(-1)

    return usual(model, torch.optim.AdamW(model.parameters(), lr=3e-3), data, classify(model), dtype)


class Outliers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(12, 32)
        self.norm = nn.LayerNorm(32)
        self.out = nn.Linear(32, 4)
        with torch.no_grad():
            self.lift.bias[7] = 2.0e5  # a massive activation, beyond fp16; bf16 has the range of fp32
            self.norm.weight[7] = 0.01

    def forward(self, x):
        wide = self.lift(x)
        return self.out(torch.cat([self.norm(wide)[:, 7:8], F.layer_norm(torch.cat([wide[:, :7], wide[:, 8:]], 1), (31,))], 1))


def massive_activation_in_bf16(dtype: torch.dtype = torch.bfloat16) -> Training:
    model = Outliers()

    def data(i):
        x = noise(24, 12, key=(84, i))
        return x, x[:, :4].argmax(-1)

    return usual(model, torch.optim.Adam(model.parameters(), lr=5e-3), data, classify(model), dtype)


def confident_logits_held_by_z_loss(dtype: torch.dtype = torch.bfloat16) -> Training:
    """Logits of +-40 on an easy task, held by a z-loss in fp32."""
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    with torch.no_grad():
        model[2].weight.mul_(20)

    def data(i):
        x = noise(24, 12, key=(85, i))
        return x, x[:, :4].argmax(-1)

    def loss_of(x, label):
        logits = model(x).float()
        return F.cross_entropy(logits, label) + 1e-4 * logits.logsumexp(-1).square().mean()

    return usual(model, torch.optim.Adam(model.parameters(), lr=5e-3), data, loss_of, dtype)


def smoothed_labels_with_ignored_ones(dtype: torch.dtype = torch.float16) -> Training:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 6))

    def data(i):
        x, label = pictures(i, rows=16)
        label[::5] = -100
        return x, label

    return usual(model, torch.optim.SGD(model.parameters(), lr=0.05), data, classify(model, label_smoothing=0.1), dtype)


def missing_labels_are_nan(dtype: torch.dtype = torch.float16) -> Training:
    """A table with holes: the NaN of a missing target is replaced before it meets the prediction."""
    model = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 3))

    def data(i):
        x = noise(32, 10, key=(86, i))
        target = torch.tanh(x[:, :3])
        return x, target.masked_fill(noise(32, 3, key=(87, i)) > 0.5, float("nan"))

    def loss_of(x, target):
        known = ~target.isnan()
        error = model(x).float() - torch.where(known, target, 0.0)
        return error.square()[known].mean()

    return usual(model, torch.optim.Adam(model.parameters(), lr=5e-3), data, loss_of, dtype)


class Sdpa(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 3)

    def forward(self, x, present):
        q, k, v = self.qkv(x).chunk(3, -1)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=present[:, None, :].expand(-1, x.shape[1], -1))
        return self.out((seen * present[..., None]).sum(1))


def empty_rows_in_library_attention(dtype: torch.dtype = torch.bfloat16) -> Training:
    """One set of the batch is empty; with a boolean mask the library returns 0 for its rows."""
    model = Sdpa()

    def data(i):
        label = torch.arange(12) % 3
        present = torch.ones(12, 6, dtype=torch.bool)
        present[5] = False
        present[:, 4:] = False
        return noise(12, 6, 16, key=(88, i)) + F.one_hot(label, 16)[:, None], present, label

    def loss_of(x, present, label):
        return F.cross_entropy(model(x, present), label)

    return usual(model, torch.optim.Adam(model.parameters(), lr=0.01), data, loss_of, dtype)


def forward_algorithm_with_impossible_states(dtype: torch.dtype = torch.bfloat16) -> Training:
    """A left-to-right chain in log space: impossible moves cost 1e30, which logsumexp in fp32 takes well."""
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))
    moves = torch.arange(4) - torch.arange(4)[:, None]
    cost = torch.where((moves == 0) | (moves == 1), 0.0, -1e30)

    def data(i):
        state = (torch.arange(12) // 3)[None].expand(6, -1)
        return (noise(6, 12, 8, key=(89, i)) + 2 * F.one_hot(state, 8),)

    def loss_of(x):
        emit = model(x).float().log_softmax(-1)
        alpha = torch.full((6, 4), -1e30)
        alpha[:, 0] = 0.0
        for t in range(12):
            alpha = torch.logsumexp(alpha[:, :, None] + cost, 1) + emit[:, t]
        return -alpha[:, 3].mean() / 12

    return usual(model, torch.optim.Adam(model.parameters(), lr=0.01), data, loss_of, dtype)


PROGRAMS = [
    *healthy(causal_mask_of_minus_infinity),
    *healthy(checkpointed_blocks_with_dropout),
    *healthy(large_vocabulary_of_which_few_appear),
    *healthy(frozen_backbone_and_an_unused_head),
    *healthy(branches_that_begin_at_zero),
    *healthy(massive_activation_in_bf16),
    *healthy(confident_logits_held_by_z_loss),
    *healthy(smoothed_labels_with_ignored_ones),
    *healthy(missing_labels_are_nan),
    *healthy(empty_rows_in_library_attention),
    *healthy(forward_algorithm_with_impossible_states),
]
