"""Plain networks in states that look odd and are healthy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from corpus import BF16, BOTH, Training, healthy
from corpus.architectures import Transformer, token_loss
from corpus.draws import noise, seed_torch, whole
from corpus.loops import network


def wide(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss of the output in FP32, whatever the network's format."""
    return lambda out, target: loss(out.float(), target)


def zero_head(dtype: torch.dtype = BF16) -> Training:
    seed_torch(5)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    return network(model, noise(8, 16, key=4), wide(F.cross_entropy), whole(5, 8), dtype)


def large_targets(dtype: torch.dtype = BF16) -> Training:
    seed_torch(5)
    return network(
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)),
        noise(32, 16, key=4),
        wide(F.mse_loss),
        noise(32, 1, key=4) * 1000 + 5000,
        dtype,
    )


def raw_inputs(dtype: torch.dtype = BF16) -> Training:
    seed_torch(5)
    return network(
        nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)),
        noise(32, 8, key=4) * 50 + 100,
        wide(F.cross_entropy),
        whole(2, 32),
        dtype,
    )


def pixels(dtype: torch.dtype = BF16) -> Training:
    seed_torch(5)
    convs = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    return network(
        nn.Sequential(*convs),
        (noise(4, 3, 16, 16, key=4).abs() * 80).clamp(0, 255).round(),
        wide(F.cross_entropy),
        whole(4, 4),
        dtype,
    )


def batch_norm_of_two(dtype: torch.dtype = BF16) -> Training:
    """Two samples that are close in a channel: the norm divides a small difference by itself."""
    seed_torch(5)
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)]
    return network(nn.Sequential(*layers), noise(2, 8, key=4), wide(F.cross_entropy), whole(3, 2), dtype)


def saturated(dtype: torch.dtype = BF16) -> Training:
    seed_torch(5)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    with torch.no_grad():
        model[0].weight.mul_(20)
    return network(model, noise(16, 8, key=4), wide(F.cross_entropy), whole(3, 16), dtype)


def large_vocabulary(dtype: torch.dtype = BF16, vocabulary: int = 2000) -> Training:
    seed_torch(5)
    return network(
        nn.Sequential(nn.Embedding(vocabulary, 16), nn.Linear(16, vocabulary)),
        whole(2000, 32),
        wide(F.cross_entropy),
        whole(2000, 32),
        dtype,
    )


def dead_units(dtype: torch.dtype = BF16) -> Training:
    seed_torch(5)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    nn.init.constant_(model[0].bias, -5.0)
    return network(model, noise(16, 8, key=4), wide(F.cross_entropy), whole(3, 16), dtype)


def outlier_channel(dtype: torch.dtype = BF16) -> Training:
    seed_torch(5)
    model, ids = Transformer(2), whole(50, 4, 16)
    with torch.no_grad():
        model.token.weight[:, 3] *= 60
    return network(model, ids, wide(token_loss), ids, dtype)


def deep(dtype: torch.dtype = BF16) -> Training:
    seed_torch(5)
    layers = [layer for _ in range(16) for layer in (nn.Linear(24, 24), nn.ReLU())]
    return network(nn.Sequential(*layers, nn.Linear(24, 3)), noise(16, 24, key=4), wide(F.cross_entropy), whole(3, 16), dtype)


PROGRAMS = [
    *healthy(zero_head, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8, policies=("native", "full")),
    *healthy(large_targets, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8, policies=("native", "full")),
    *healthy(raw_inputs, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8, policies=("native", "full")),
    *healthy(pixels, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8, policies=("native", "full")),
    *healthy(batch_norm_of_two, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8, policies=("native", "full")),
    *healthy(saturated, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8, policies=("native", "full")),
    *healthy(
        large_vocabulary,
        tools="diagnose monitor examine diff whatif",
        dtypes=BOTH,
        steps=8,
        policies=("native", "full"),
        sizes=({"vocabulary": 5000},),
    ),
    *healthy(dead_units, tools="examine diff", dtypes=BOTH, steps=8, policies=("native", "full")),
    *healthy(outlier_channel, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8, policies=("native", "full")),
    *healthy(deep, tools="examine diff", dtypes=BOTH, steps=8, policies=("native", "full")),
]
