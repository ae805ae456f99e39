"""Single steps that go wrong in FP32 too."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus import BF16, FP32, WIDE, Training, planted
from corpus.architectures import Between, Call, between
from corpus.draws import noise
from corpus.loops import repeated


def root_of_zero(fixed: bool = False, dtype: torch.dtype = BF16, rows: int = 32, width: int = 16) -> Training:
    def distance(x: Tensor) -> Tensor:
        d = x - x.roll(1, 0) * torch.tensor([[1.0]] + [[0.5]] * (x.shape[0] - 1)).to(x.dtype)
        squares = (d * 0).pow(2).sum(-1, keepdim=True)
        return x + (squares + (1e-3 if fixed else 0)).sqrt()

    return between(distance, dtype, rows=rows, width=width)


def nan_in_the_batch(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    model = Between(nn.ReLU())
    x, y = noise(8, 16), noise(8, 4, key=2)
    x[2, 3] = 0.0 if fixed else math.nan
    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype)


def infinity_that_forward_hides(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    """tanh of infinity is 1, and the gradient of the first layer 0 times infinity."""
    model = Between(nn.Tanh())
    x, y = noise(8, 16), noise(8, 4, key=2)
    x[2, 3] = 0.0 if fixed else math.inf
    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype)


def division_hidden_by_where(fixed: bool = False, dtype: torch.dtype = BF16, rows: int = 32, width: int = 16) -> Training:
    def guarded(x: Tensor) -> Tensor:
        zero = x * 0
        return torch.where(x.abs() < 10, x, 1 / (zero + 1 if fixed else zero))

    return between(guarded, dtype, rows=rows, width=width)


def angle_between_equal_directions(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    model = Between(nn.Identity(), outputs=4)
    x = noise(64, 16)

    def step_loss() -> Tensor:
        out = F.normalize(model(x).float(), dim=-1)
        cosine = (out * out).sum(-1).clamp(-2, 2).round()
        same = out[:, 0] * 0 + cosine.detach()
        return torch.acos(same * (0.9 if fixed else 1.0)).sum() + out.sum()

    return repeated(model, step_loss, dtype)


def logarithm_of_an_empty_count(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    model = Between(nn.Identity(), outputs=1)
    x = noise(64, 16)
    counts = x[:, :1].abs() + 1
    counts[3] = 1.0 if fixed else 0.0

    def step_loss() -> Tensor:
        return F.mse_loss(model(x).float(), torch.log(counts))

    return repeated(model, step_loss, dtype)


def score_that_reaches_zero(fixed: bool = False, dtype: torch.dtype = FP32, rows: int = 32, width: int = 16) -> Training:
    """A ReLU gives exact zeros; their logarithm has no finite value in any format."""

    def log_of_scores(x: Tensor) -> Tensor:
        scores = torch.relu(x)
        return (scores + (1e-3 if fixed else 0.0)).log()

    return between(log_of_scores, dtype, rows=rows, width=width)


def variance_by_two_moments_of_a_sum(fixed: bool = False, dtype: torch.dtype = FP32) -> Training:
    """E[x]^2 - E[x^2] by mistake: the root of a negative number."""

    def spread(x: Tensor) -> Tensor:
        mean, square = x.mean(-1, keepdim=True), (x * x).mean(-1, keepdim=True)
        return x / (square - mean * mean if fixed else mean * mean - square).sqrt()

    return between(spread, dtype)


def share_of_an_empty_group(fixed: bool = False, dtype: torch.dtype = FP32) -> Training:
    """No element passes the threshold: 0 / 0."""

    def shares(x: Tensor) -> Tensor:
        chosen = (x > 100).to(x.dtype)
        return x * (chosen.sum() / (chosen.sum() + 1e-6 if fixed else chosen.sum())) + x

    return between(shares, dtype)


def energies_to_the_eighth(fixed: bool = False, dtype: torch.dtype = FP32) -> Training:
    """Moments of large numbers, divided by each other: each is beyond 3.4e38."""

    def moments(x: Tensor) -> Tensor:
        energy = x * (1.0 if fixed else 1e6)
        fourth = energy.pow(4)
        return x * (fourth * fourth).mean() / (fourth * fourth).sum()

    return between(moments, dtype)


def mask_that_is_averaged(fixed: bool = False, dtype: torch.dtype = FP32) -> Training:
    """-inf marks what is not allowed, and then the scores are centred."""

    def centred(x: Tensor) -> Tensor:
        marked = x.masked_fill(x > 1, -1e4 if fixed else -math.inf)
        return torch.softmax(marked - marked.mean(-1, keepdim=True), -1)

    return between(centred, dtype)


_times = [0]


@torch.library.custom_op("corpus::scratch", mutates_args=())
def _scratch(x: Tensor, broken: bool) -> Tensor:
    """Zeros, or what stood in memory before: no function of its input."""
    out = torch.zeros_like(x)
    _times[0] += 1
    if broken and _times[0] % 2 and _times[0] > 2:
        out.view(-1)[3] = math.inf
    return out


def kernel_with_a_race(fixed: bool = False, dtype: torch.dtype = FP32) -> Training:
    _times[0] = 0
    model = Between(Call(lambda x: x + _scratch(x.detach(), not fixed)))
    x, y = noise(8, 16), noise(8, 4, key=2)
    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype)


PROGRAMS = [
    *planted(
        kernel_with_a_race, "not_reproducible", "fault", steps=8, precision_caused=False, findings="INF NAN WEIGHT_NONFINITE"
    ),
    *planted(
        score_that_reaches_zero,
        "undefined_operation",
        "fault",
        "op:log",
        steps=8,
        sizes=WIDE,
        hazards="singular_backward",
        precision_caused=False,
        findings="INF NAN WEIGHT_NONFINITE",
        also=(BF16,),
    ),
    *planted(
        variance_by_two_moments_of_a_sum,
        "undefined_operation",
        "fault",
        "op:sqrt",
        steps=8,
        hazards="singular_backward",
        precision_caused=False,
        findings="NAN WEIGHT_NONFINITE",
        also=(BF16,),
    ),
    *planted(
        share_of_an_empty_group,
        "undefined_operation",
        "fault",
        "op:div",
        steps=8,
        hazards="singular_backward",
        precision_caused=False,
        findings="NAN WEIGHT_NONFINITE",
        also=(BF16,),
    ),
    *planted(
        energies_to_the_eighth,
        "float32_overflow",
        "fault",
        "op:mul",
        steps=8,
        hazards="singular_backward",
        precision_caused=False,
        findings="INF NAN WEIGHT_NONFINITE",
        also=(BF16,),
    ),
    *planted(
        mask_that_is_averaged,
        "undefined_operation",
        "fault",
        "op:sub",
        steps=8,
        hazards="singular_backward",
        precision_caused=False,
        findings="NAN WEIGHT_NONFINITE",
        also=(BF16,),
    ),
    *planted(
        root_of_zero,
        "singular_gradient",
        "fault",
        "op:div",
        "op:norm",
        steps=8,
        sizes=WIDE,
        hazards="singular_backward",
        precision_caused=False,
        findings="NAN WEIGHT_NONFINITE",
    ),
    *planted(
        nan_in_the_batch,
        "data_nan",
        "data:input",
        steps=8,
        hazards="given_nonfinite",
        precision_caused=False,
        findings="INPUT_NONFINITE WEIGHT_NONFINITE",
    ),
    *planted(
        infinity_that_forward_hides,
        "data_nan",
        "data:input",
        steps=8,
        hazards="given_nonfinite",
        precision_caused=False,
        findings="NAN WEIGHT_NONFINITE",
    ),
    *planted(
        division_hidden_by_where,
        "singular_gradient",
        "fault",
        steps=8,
        sizes=WIDE,
        hazards="singular_backward",
        precision_caused=False,
        findings="NAN WEIGHT_NONFINITE",
    ),
    *planted(
        angle_between_equal_directions,
        "singular_gradient",
        "op:acos",
        steps=8,
        hazards="singular_backward",
        precision_caused=False,
        findings="NAN WEIGHT_NONFINITE",
    ),
    *planted(
        logarithm_of_an_empty_count,
        "data_nan",
        "data:target",
        steps=8,
        hazards="singular_backward",
        precision_caused=False,
        findings="INF WEIGHT_NONFINITE",
    ),
]
