"""Precision loss that drowns the signal: phases, differences of near-equal numbers, outputs with an offset, log-probabilities."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus import Training, planted
from corpus.draws import generator
from corpus.loops import Run, ends_above, low, supervised


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    even, odd = x.chunk(2, -1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([even * cos - odd * sin, even * sin + odd * cos], -1)


class RotaryAttention(nn.Module):
    def __init__(self, width: int, fp32_phase: bool) -> None:
        super().__init__()
        self.qk = nn.Linear(width, 2 * width, bias=False)
        self.register_buffer("inverse_frequency", 100.0 ** (-torch.arange(0, width, 2) / width))
        self.fp32_phase = fp32_phase

    def forward(self, x: Tensor, positions: Tensor, value: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        dtype = torch.float32 if self.fp32_phase else q.dtype
        angle = positions.to(dtype)[:, None] * self.inverse_frequency.to(dtype)
        q, k = rotate(q, angle), rotate(k, angle)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return scores.float().softmax(-1) @ value.float()


class Lookback(nn.Module):
    """Says which token stood three places before: only the rotary phase can tell."""

    def __init__(self, fp32_phase: bool) -> None:
        super().__init__()
        self.content = nn.Parameter(torch.ones(16))
        self.attention = RotaryAttention(16, fp32_phase)
        self.sharpness = nn.Parameter(torch.tensor(4.0))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = (self.content * self.sharpness).expand(*tokens.shape, 16)
        return self.attention(x, positions, F.one_hot(tokens, 8)).clamp_min(1e-4).log()[:, 3:]


def long_context(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """A chunk at position 5000 of a long document: in bf16 its positions collapse to multiples of 32."""
    model = Lookback(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    positions = torch.arange(5000, 5024)

    def batch(i: int) -> list[Tensor]:
        tokens = torch.randint(8, (8, 24), generator=generator(41, i))
        return [tokens, positions, tokens[:, :-3]]

    return supervised(model, optimizer, batch, lambda out, y: F.nll_loss(out.flatten(0, 1), y.flatten()), dtype)


class FourierField(nn.Module):
    """A coordinate network with Fourier features, as neural fields use them."""

    def __init__(self, fp32_phase: bool) -> None:
        super().__init__()
        self.encode = Fourier(fp32_phase)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.encode(x)).squeeze(-1)


class Fourier(nn.Module):
    def __init__(self, fp32_phase: bool) -> None:
        super().__init__()
        frequencies = torch.tensor([[60.0, 64, 71, 80, 83, 90, 95, 101]])
        self.register_buffer("frequencies", 2 * torch.pi * frequencies)
        self.fp32_phase = fp32_phase

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu") and not self.fp32_phase):
            phase = x @ self.frequencies  # up to 635 rad
        return torch.cat([phase.sin(), phase.cos()], -1)


def fine_texture(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """The phase of a fine texture comes out of a bf16 matmul: near 400 rad it is a multiple of 2."""
    model = FourierField(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def batch(i: int) -> list[Tensor]:
        x = torch.rand(64, 1, generator=generator(42, i))
        return [x, torch.sin(2 * torch.pi * 71 * x[:, 0])]

    return supervised(model, optimizer, batch, F.mse_loss, dtype)


class OnePassNorm(nn.Module):
    """Instance norm with E[x^2] - E[x]^2, which needs one pass over the picture."""

    def __init__(self, channels: int, two_pass: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels, 1, 1))
        self.two_pass = two_pass

    def forward(self, x: Tensor) -> Tensor:
        if self.two_pass:
            return F.instance_norm(x.float()) * self.gain
        mean = x.mean((2, 3), keepdim=True)
        variance = (x * x).mean((2, 3), keepdim=True) - mean * mean
        return (x - mean) * torch.rsqrt(variance + 1e-5) * self.gain


class Pictures(nn.Module):
    def __init__(self, two_pass: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3)
        self.norm = OnePassNorm(8, two_pass)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stem(x)).relu().mean((2, 3)))


def bright_pictures(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """Pictures that become brighter: once the mean is 16 times the spread, the one-pass variance is 0 or negative in bf16."""
    model = Pictures(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    stripes = torch.tensor([1.0, -1.0]).repeat(4).expand(8, 8)

    def batch(i: int) -> list[Tensor]:
        draw = generator(44, i)
        label = torch.randint(2, (16,), generator=draw)
        pattern = torch.stack([stripes, stripes.t()])[label][:, None]
        return [pattern + 0.5 * torch.randn(16, 1, 8, 8, generator=draw) + 0.5 * i, label]

    return supervised(model, optimizer, batch, F.cross_entropy, dtype)


class Membrane(nn.Module):
    """A network u(x) for a differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.u(x)


def physics_informed(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """u' = cos(x) by finite differences with h = 0.001: under autocast u(x+h) and u(x-h) are often the same bf16 number."""
    model = Membrane()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    h = 0.001

    def batch(i: int) -> list[Tensor]:
        x = torch.rand(32, 1, generator=generator(45, i)) * 4 - 2
        return [x, x.cos()]

    def step(i: int) -> Tensor:
        x, wanted = batch(i)
        optimizer.zero_grad()
        with low(torch.float32 if fixed else dtype):
            slope = (model(x + h) - model(x - h)) / (2 * h)
            loss = F.mse_loss(slope, wanted)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


class Thermometer(nn.Module):
    def __init__(self, centred: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.kelvin = nn.Linear(16, 1)
        self.centred = centred
        nn.init.constant_(self.kelvin.bias, 0.0 if centred else 295.0)

    def forward(self, x: Tensor) -> Tensor:
        out = self.kelvin(self.body(x)).squeeze(-1)
        return out.float() + 295.0 if self.centred else out


def kelvin(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """A regression of temperatures near 295 K: the bf16 output knows only even numbers."""
    model = Thermometer(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    relation = torch.randn(5, generator=generator(46)) / 2

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 5, generator=generator(47, i))
        return [x, 295 + torch.tanh(x @ relation)]

    return supervised(model, optimizer, batch, F.mse_loss, dtype)


class NextWord(nn.Module):
    """A bigram language model with an output layer."""

    def __init__(self, fp32_head: bool, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 16)
        self.mix = nn.Linear(16, 16)
        self.lm_head = nn.Linear(16, vocabulary)
        self.fp32_head = fp32_head
        nn.init.constant_(self.lm_head.bias, 3000.0)

    def forward(self, words: Tensor) -> Tensor:
        x = F.gelu(self.mix(self.embed(words)))
        if not self.fp32_head:
            return self.lm_head(x)
        with torch.autocast("cpu", enabled=False):
            return self.lm_head(x.float())


def drifted_logits(fixed: bool = False, dtype: torch.dtype = torch.bfloat16, vocabulary: int = 30) -> Training:
    """Logits have drifted to 3000, which no loss sees: bf16 leaves them multiples of 16."""
    model = NextWord(fixed, vocabulary)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    follows = torch.randperm(vocabulary, generator=generator(48))

    def batch(i: int) -> list[Tensor]:
        words = torch.randint(vocabulary, (16, 8), generator=generator(49, i))
        return [words, follows[words]]

    return supervised(model, optimizer, batch, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), dtype)


class TinyWriter(nn.Module):
    """A language model: the next of 64 words from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.head = nn.Linear(16, 64)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.embed(text[:, :-1]))


def sequence_logprob(logits: Tensor, text: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, text[:, 1:, None]).squeeze(-1).sum(-1)


def preference(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """DPO on texts of 200 words: log-probabilities near -830 are multiples of 4 in bf16, their margins are below 1."""
    policy = TinyWriter()
    frozen = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0003)

    def logprob(model: nn.Module, text: Tensor) -> Tensor:
        logits = model(text)
        return sequence_logprob(logits.float() if fixed else logits, text)

    def step(i: int) -> Tensor:
        draw = generator(50, i)
        chosen, rejected = torch.randint(0, 40, (8, 200), generator=draw), torch.randint(24, 64, (8, 200), generator=draw)
        optimizer.zero_grad()
        with low(dtype):
            with torch.no_grad():
                base = logprob(frozen, chosen) - logprob(frozen, rejected)
            margin = logprob(policy, chosen) - logprob(policy, rejected) - base
            loss = -F.logsigmoid(margin).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(policy, optimizer, step)


class Writer(nn.Module):
    """A recurrent policy that writes 64 symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 16, batch_first=True)
        self.symbols = nn.Linear(16, 32)

    def forward(self, prompt: Tensor) -> Tensor:
        return self.symbols(self.gru(prompt)[0])


def two_engines(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """GSPO: texts are written under bf16, trained in fp32; the clip range of 3e-4 is narrower than what the two differ by.

    A step returns how improbable the wanted symbol still is.
    """
    model = Writer()
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)

    def logprob(prompt: Tensor, text: Tensor) -> Tensor:
        return model(prompt).log_softmax(-1).gather(-1, text[..., None]).squeeze(-1).float().mean(-1)  # per symbol

    def step(i: int) -> float:
        draw = generator(51, i)
        prompt = torch.randn(32, 64, 4, generator=draw)
        with torch.no_grad(), low(dtype):
            shares = model(prompt).float().softmax(-1)
            text = torch.multinomial(shares.flatten(0, 1), 1, generator=draw).view(32, 64)
            old = logprob(prompt, text)
        reward = (text < 4).float().mean(-1)
        advantage = (reward - reward.mean()) / reward.std()
        if fixed:
            old = logprob(prompt, text).detach()
        ratio = (logprob(prompt, text) - old).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - 3e-4, 1 + 3e-4) * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return 1 - float(shares[..., :4].sum(-1).mean())

    return Training(model, optimizer, step)


def rises(run: Run) -> bool:
    """The loss is half as large again as a step before, a fifth of the time."""
    return sum(b > 1.5 * a for a, b in zip(run.losses, run.losses[1:])) >= len(run.losses) / 5


PROGRAMS = [
    *planted(long_context, "position_precision_loss", "attention", hazards="integers", shows=ends_above(1), steps=30),
    *planted(fine_texture, "position_precision_loss", "encode", hazards="phase", shows=ends_above(0.1), steps=30),
    *planted(bright_pictures, "catastrophic_cancellation", "norm", shows=ends_above(1), steps=30),
    *planted(physics_informed, "catastrophic_cancellation", "op:sub", hazards="cancellation", shows=ends_above(0.15), steps=40),
    *planted(kelvin, "low_precision_output_head", "kelvin", hazards="absorption", shows=ends_above(0.2), steps=30),
    *planted(
        drifted_logits,
        "low_precision_output_head",
        "lm_head",
        sizes=({"vocabulary": 5000},),
        hazards="absorption",
        shows=ends_above(1),
        steps=30,
    ),
    *planted(
        preference,
        "logprob_rounding",
        *("op:sum", "op:sub", "op:log_softmax", "op:_log_softmax"),
        hazards="cancellation absorption",
        examined=1,
        shows=rises,
        steps=30,
    ),
    *planted(
        two_engines,
        "train_infer_mismatch",
        *("op:exp", "op:sub", "op:log_softmax", "op:_log_softmax", "loop:rollout", "data:input", "data"),
        shows=ends_above(0.4),
        steps=18,
    ),
]
