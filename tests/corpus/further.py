"""Causes beyond one tensor in one format: FP8 scales, collectives, fused attention, the optimizer's memory, weight decay."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus import Training, planted
from corpus.draws import generator
from corpus.loops import Run, ends_above, supervised

E4M3_MAX = 448.0


def to_e4m3(x: Tensor, amax: float) -> Tensor:
    """Through FP8 and back, with a straight-through gradient."""
    scale = E4M3_MAX / max(amax, 1e-12)
    rounded = (x.detach() * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() / scale
    return x + (rounded - x).detach()


class Fp8Linear(nn.Linear):
    """A linear layer with FP8 operands; with delayed scaling the input's scale is the largest value of the last 4 steps."""

    def __init__(self, inputs: int, outputs: int, scaling: str) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("amax_history", torch.zeros(4))
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        if self.scaling == "none":
            return F.linear(x, self.weight, self.bias)
        current = float(x.detach().abs().max())
        known = float(self.amax_history.max()) if self.scaling == "delayed" else current
        self.amax_history.copy_(torch.cat([self.amax_history[1:], torch.tensor([current])]))
        weight = to_e4m3(self.weight, float(self.weight.detach().abs().max()))
        return F.linear(to_e4m3(x, known or current), weight, self.bias)


class Fp8Net(nn.Module):
    def __init__(self, scaling: str) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = Fp8Linear(32, 1, scaling)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square()).squeeze(-1)


def delayed_scaling(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """Every sixth batch has inputs ten times larger; squared ReLU makes that a hundred, which the history has not seen."""
    model = Fp8Net("none" if dtype == torch.float32 else "current" if fixed else "delayed")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 8, generator=generator(91, i)) * (10 if i % 6 == 5 else 1)
        return [x, x.square().mean(-1)]

    return supervised(model, optimizer, batch, lambda out, y: (out - y).abs().mean() / y.mean(), dtype)


class FusedAttention(nn.Module):
    """What a fused kernel computes: exp(scores - max) as bf16, times V, summed in fp32, stored as bf16, then normalised.

    Keys come from the kind of a token, values from its content.
    """

    def __init__(self, dtype: torch.dtype, tie_aware: bool) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 8), nn.Linear(4, 8)
        self.value = nn.Linear(4, 8)
        self.dtype = dtype
        self.tie_aware = tie_aware

    def weights(self, kind: Tensor) -> Tensor:
        """Unnormalised: exactly 1 where a score is the row's maximum, unless the shift is tie-aware."""
        scores = self.query(kind) @ self.key(kind).transpose(-1, -2)
        top = scores.amax(-1, keepdim=True) + (0.7 if self.tie_aware else 0.0)
        return (scores - top).exp().to(self.dtype)

    def forward(self, kind: Tensor, content: Tensor) -> Tensor:
        p = self.weights(kind)
        mixed = p @ self.value(content).to(self.dtype)
        return mixed.float() / p.float().sum(-1, keepdim=True)


class PairedTokens(nn.Module):
    """One attention; its values have a strong mean, which the head subtracts."""

    def __init__(self, dtype: torch.dtype, tie_aware: bool) -> None:
        super().__init__()
        self.attention = FusedAttention(dtype, tie_aware)
        self.head = nn.Linear(8, 1)
        nn.init.constant_(self.attention.value.bias, -3.0)
        for layer in (self.attention.query, self.attention.key):
            nn.init.constant_(layer.bias, 0.0)
            layer.weight.data.copy_(3 * torch.eye(8, 4))

    def forward(self, kind: Tensor, content: Tensor) -> Tensor:
        return self.head((self.attention(kind, content) + 3) * 4).mean((1, 2))


def tokens(*key: int) -> list[Tensor]:
    """Each of four kinds of token occurs twice, with two contents."""
    return [torch.eye(4).repeat(2, 1).expand(32, 8, 4), torch.randn(32, 8, 4, generator=generator(*key))]


def equal_keys(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """Two keys share every row's maximum, so two probabilities are exactly 1, and sums of V's of one sign all round one way."""
    model = PairedTokens(dtype, fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    relation = torch.randn(4, generator=generator(94)) / 3

    def batch(i: int) -> list[Tensor]:
        kind, content = tokens(95, i)
        return [kind, content, (content @ relation).mean(-1)]

    return supervised(model, optimizer, batch, F.mse_loss, torch.float32)


def rounds_one_way(run: Run) -> bool:
    """The mean error of P V, against float64, is half of its standard deviation or more."""
    attention = run.training.model.attention
    assert isinstance(attention, FusedAttention)
    kind, content = tokens(96)
    with torch.no_grad():
        p, v = attention.weights(kind), attention.value(content).to(attention.dtype)
        error = (p @ v).double() - p.double() @ v.double()
    return bool(error.mean().abs() > error.std() / 2 > 1e-4)


def sudden_batches(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """Six batches with wrong labels after 150 good ones: Adam's second moment still remembers the small gradients.

    Updates of several times the learning rate, all in one direction, undo in six steps what 150 have learnt.
    """
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, betas=(0.9, 0.999), weight_decay=0.0)
    relation = torch.randn(6, generator=generator(97)) / 2

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 6, generator=generator(98, i))
        y = torch.tanh(x @ relation)[:, None]
        return [x, 40 * y.flip(0) + 40 if 150 <= i < 156 else y]

    return supervised(model, optimizer, batch, F.mse_loss, dtype, clip=0.05 if fixed else None)


def decayed(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """bf16 weights, AdamW with lr 2e-3 and decay 0.5: the steps arrive, but w * 0.999 is w, so nothing is ever forgotten."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
    for p in model.parameters():
        nn.init.normal_(p, std=0.15)
    model.to(torch.float32 if fixed else dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.5)

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 16, generator=generator(99, i))
        x[:, 8:] = 0  # features that no longer occur: only the decay acts on their weights
        return [x.to(next(model.parameters()).dtype), torch.tanh(x[:, :1] + x[:, 1:2])]

    return supervised(model, optimizer, batch, lambda out, y: F.mse_loss(out.float(), y), dtype)


def never_forgets(run: Run) -> bool:
    """The weights of the absent features are what they were at the start."""
    torch.manual_seed(0)
    fresh = decayed().model[0].weight[:, 8:].float()
    now = run.training.model[0].weight[:, 8:].float()
    return bool(now.norm() > 0.995 * fresh.norm())


MLP = ("0.weight", "0.bias", "2.weight", "2.bias")

PROGRAMS = [
    *planted(
        delayed_scaling,
        "fp8_scale_stale",
        *("down", "down.amax_history"),
        hazards="saturation",
        examined=5,
        shows=lambda run: max(run.losses[10:]) > 0.8,
        steps=30,
    ),
    *planted(equal_keys, "flash_attention_bias", "attention", shows=rounds_one_way, steps=30),
    *planted(
        sudden_batches,
        "optimizer_v_lag",
        *("optimizer", "optimizer.betas", "optimizer.beta2", "optimizer.exp_avg_sq", *MLP),
        findings="LOSS_SPIKE",
        twin="diagnose",
        shows=ends_above(1),
        steps=210,
        precision_caused=False,
    ),
    *planted(
        decayed,
        "weight_decay_lost",
        *("optimizer", "optimizer.weight_decay", *MLP),
        findings="STATE_STAGNATION",
        hazards="decay_lost",
        shows=never_forgets,
        steps=60,
    ),
]
