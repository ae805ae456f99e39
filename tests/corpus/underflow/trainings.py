"""Planted underflow: gradients without a scale, a scale too low, a protective eps of zero, products of probabilities."""

from __future__ import annotations

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

from corpus import Training, planted
from corpus.draws import noise
from corpus.loops import Run, usual


class Depth(nn.Module):
    """Dense depth in kilometres."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.Tanh())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.Tanh())
        self.up = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x):
        return self.up(self.body(self.down(x))) * 0.01


def dense_depth_without_scaler(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """A mean over 4,608 pixels of errors of 0.01 km: the gradient per activation is some 1e-9, below fp16's 3e-8."""
    model = Depth()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def data(i):
        x = noise(8, 3, 24, 24, key=(31, i))
        return x, 0.02 + 0.01 * x.mean(1, keepdim=True)

    def loss_of(x, depth):
        return F.mse_loss(model(x), depth)

    return usual(model, optimizer, data, loss_of, dtype, scaler=GradScaler("cpu", enabled=fixed and dtype == torch.float16))


class Drift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 24)
        self.rnn = nn.GRU(24, 24, batch_first=True)
        self.read = nn.Linear(24, 1)

    def forward(self, series):
        return self.read(self.rnn(torch.tanh(self.encode(series)))[0]).squeeze(-1)


def strain_in_metres_per_metre(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Targets of 1e-5: after the offset is learnt the errors are as small, and their gradients vanish in fp16."""
    model = Drift()
    with torch.no_grad():
        model.read.weight.mul_(1e-3)
        model.read.bias.zero_()
    body = [*model.encode.parameters(), *model.rnn.parameters()]
    optimizer = torch.optim.Adam([{"params": body}, {"params": model.read.parameters(), "lr": 1e-6}], lr=5e-3, eps=1e-16)

    def data(i):
        series = noise(16, 12, 4, key=(32, i))
        return series, 1e-5 * torch.tanh(series.cumsum(1)[..., 0])

    def loss_of(series, strain):
        return F.mse_loss(model(series), strain)

    scaler = GradScaler("cpu", init_scale=2.0**30, enabled=fixed and dtype == torch.float16)
    return usual(model, optimizer, data, loss_of, dtype, scaler=scaler)


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(5))
        self.match = nn.Linear(24, 8)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.match(x)


def distillation_with_a_scale_of_two(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Matching a teacher's features counts 3e-5 in the loss; a scale of 2 leaves the gradients of the lower layers below 3e-8."""
    model = Student()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-12)
    teacher = noise(20, 8, key=(33,)) * 0.5

    def data(i):
        ids = (noise(16, 16, key=(34, i)).abs() * 8).long().clamp(max=19)
        return ids, teacher[ids]

    def loss_of(ids, wanted):
        return 3e-5 * F.mse_loss(model(ids), wanted)

    scaler = GradScaler("cpu", init_scale=2.0**24 if fixed else 2.0, enabled=dtype == torch.float16)
    return usual(model, optimizer, data, loss_of, dtype, scaler=scaler)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(12, 24)
        self.tokens, self.channels = nn.Linear(9, 9), nn.Linear(24, 24)
        self.norm = nn.LayerNorm(24)
        self.value = nn.Linear(24, 1)

    def forward(self, x):
        x = F.gelu(self.patch(x))
        x = x + F.gelu(self.tokens(x.transpose(1, 2))).transpose(1, 2)
        return self.value(self.norm(x + F.gelu(self.channels(x))).mean(1)).squeeze(-1)


def scale_restored_from_a_crashed_run(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """The checkpoint brought back a scale of 2**-22; it would grow only every 2,000 steps. Value function of a game."""
    model = Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    scaler = GradScaler("cpu", enabled=dtype == torch.float16)
    if not fixed and scaler.is_enabled():
        scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**-22})

    def data(i):
        board = noise(24, 9, 12, key=(35, i))
        return board, torch.tanh(board[:, :, 0].sum(1)) * 0.1

    def loss_of(board, value):
        return F.smooth_l1_loss(model(board), value)

    return usual(model, optimizer, data, loss_of, dtype, scaler=scaler)


class LogMel(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.filters = nn.Linear(33, 12, bias=False)
        self.eps = eps

    def forward(self, power):
        return torch.log(F.relu(self.filters(power)) + self.eps)


class Speech(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.frontend = LogMel(eps)
        self.rnn = nn.GRU(12, 16, batch_first=True)
        self.word = nn.Linear(16, 4)

    def forward(self, power):
        return self.word(self.rnn(self.frontend(power) / 10)[0].mean(1))


def silence_in_a_log_mel_frontend(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """log(mel + 1e-10): from step 6 on a clip ends in digital silence, and 1e-10 is 0 in fp16."""
    model = Speech(eps=1e-4 if fixed else 1e-10)
    with torch.no_grad():
        model.frontend.filters.weight.abs_()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def data(i):
        word = torch.arange(12) % 4
        power = 0.1 + noise(12, 10, 33, key=(36, i)).square() * (1 + torch.arange(33) * word[:, None, None] / 20)
        if i >= 6:
            power[0, 5:] = 0.0
        return power, word

    def loss_of(power, word):
        return F.cross_entropy(model(power), word)

    return usual(model, optimizer, data, loss_of, dtype)


class LinearAttention(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.eps = eps

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.relu(q[..., :4]), F.relu(k[..., :4])
        weight = q @ k.sum(1).unsqueeze(-1)
        return self.out((q @ (k.transpose(1, 2) @ v)) / (weight + self.eps))


class Linformer(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.token = nn.Embedding(24, 24)
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(24), "attn": LinearAttention(24, eps)}) for _ in range(3))
        self.head = nn.Linear(24, 24)

    def forward(self, ids):
        x = self.token(ids)
        for block in self.blocks:
            x = x + block["attn"](block["norm"](x))
        return self.head(x)


def linear_attention_without_a_positive_key(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """ReLU features of four: some query has none, its weight is 0 + 1e-8 = 0 in fp16, and 0 / 0 is NaN."""
    model = Linformer(eps=1e-3 if fixed else 1e-8)
    with torch.no_grad():
        model.blocks[0]["attn"].qkv.bias[:4] = 3.0
        model.blocks[1]["attn"].qkv.bias[:4] = 3.0
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def data(i):
        return ((torch.arange(10) + (noise(8, 1, key=(37, i)).abs() * 9).long()) % 24,)

    def loss_of(ids):
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return usual(model, optimizer, data, loss_of, dtype)


class Separator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(32, 24), nn.Linear(24, 64)

    def forward(self, mix):
        return self.decoder(torch.tanh(self.encoder(mix))).view(-1, 2, 32)


def noise_ratio(seen, wanted, eps):
    """Signal to noise in decibels, the other way round: smaller is better."""
    signal = wanted.square().mean(-1)
    error = (seen - wanted).square().mean(-1)
    return -10 * torch.log10(signal / (error + eps) + eps).mean()


def silent_speaker_in_a_mixture(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """From step 4 on the second speaker of one mixture is silent: log10(0 + 1e-8) is -inf in fp16."""
    model = Separator()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def data(i):
        speakers = torch.sin(torch.arange(32) * torch.tensor([[0.4], [1.3]]) + noise(12, 2, 1, key=(38, i)))
        if i >= 4:
            speakers[2, 1] = 0.0
        return speakers.sum(1), speakers

    def loss_of(mix, speakers):
        seen = model(mix)
        return noise_ratio(seen, speakers.to(seen.dtype), 1e-3 if fixed else 1e-8)

    return usual(model, optimizer, data, loss_of, dtype)


class NoisyOr(nn.Module):
    """The log-probability that no instance of a bag is positive."""

    def __init__(self, in_logs: bool) -> None:
        super().__init__()
        self.in_logs = in_logs

    def forward(self, logits):
        if self.in_logs:
            return F.logsigmoid(-logits.float()).sum(-1)
        none = torch.cumprod(torch.sigmoid(-logits), dim=-1)[..., -1]
        return torch.log(none)


class Slides(nn.Module):
    def __init__(self, in_logs: bool) -> None:
        super().__init__()
        self.tile = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
        self.pool = NoisyOr(in_logs)

    def forward(self, bags):
        return self.pool(self.tile(bags).squeeze(-1))


def noisy_or_of_forty_tiles(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """40 tiles at one half: 0.5**40 is 9e-13, zero in fp16; its log is -inf."""
    model = Slides(in_logs=fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def data(i):
        sick = torch.arange(12) % 2
        bags = noise(12, 40, 10, key=(39, i))
        bags[:, 0, 0] += 4.0 * sick
        return bags, sick.float()

    def loss_of(bags, sick):
        none = model(bags).float()
        some = torch.log1p(-none.clamp(max=-1e-4).exp())
        return -(sick * some + (1 - sick) * none).mean()

    return usual(model, optimizer, data, loss_of, dtype)


class Speller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letter = nn.Embedding(26, 24)
        self.rnn = nn.GRU(24, 24, batch_first=True)
        self.next = nn.Linear(24, 26)

    def forward(self, letters):
        return self.next(self.rnn(self.letter(letters))[0]).softmax(-1)


def likelihood_as_a_product(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """The probability of a word of 14 letters begins at 26**-14 = 2e-20: 0 in fp16, fine in fp32."""
    model = Speller()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def data(i):
        return ((torch.arange(15) * 3 + (noise(10, 1, key=(40, i)).abs() * 10).long()) % 26,)

    def loss_of(word):
        p = model(word[:, :-1]).gather(-1, word[:, 1:, None]).squeeze(-1)
        if fixed:
            return -p.float().log().sum(-1).mean()
        likelihood = p[:, 0]
        for t in range(1, p.shape[1]):
            likelihood = likelihood * p[:, t]
        return -torch.log(likelihood).mean()

    return usual(model, optimizer, data, loss_of, dtype)


def unmoved(*names: str):
    def shows(run: Run) -> bool:
        return set(names) <= run.still and run.finite

    return shows


SCALE = ("scaler.scale", "scaler")
FLUSHED_DEPTH = tuple(f"{layer}{part}" for layer in ("down.0", "down.2", "body.0", "body.2") for part in ("", ".weight", ".bias"))
FLUSHED_RNN = tuple(f"rnn.{name}_l0" for name, _ in nn.GRUCell(1, 1).named_parameters())
FLUSHED_DRIFT = ("encode", "encode.weight", "encode.bias", "rnn", *FLUSHED_RNN)

PROGRAMS = [
    *planted(
        dense_depth_without_scaler,
        "grad_underflow_no_scaling",
        "scaler",
        *FLUSHED_DEPTH,
        findings="UNDERFLOW",
        hazards="flush",
        shows=unmoved("down.0.weight", "down.2.weight", "body.0.weight"),
    ),
    *planted(
        strain_in_metres_per_metre,
        "grad_underflow_no_scaling",
        "scaler",
        *FLUSHED_DRIFT,
        findings="UNDERFLOW",
        hazards="flush",
        shows=unmoved("encode.weight", "rnn.weight_hh_l0"),
    ),
    *planted(
        distillation_with_a_scale_of_two,
        "loss_scale_too_low",
        *SCALE,
        findings="UNDERFLOW",
        hazards="flush",
        shows=unmoved("embed.weight", "layers.0.weight"),
    ),
    *planted(
        scale_restored_from_a_crashed_run,
        "loss_scale_too_low",
        *SCALE,
        findings="UNDERFLOW",
        hazards="flush",
        shows=unmoved("patch.weight"),
    ),
    *planted(
        silence_in_a_log_mel_frontend,
        "eps_underflow_fp16",
        "frontend",
        findings="NAN SCALE_DECLINE",
        hazards="constant_lost",
        examined=6,
        shows=lambda run: run.stuck,
    ),
    *planted(
        linear_attention_without_a_positive_key,
        "eps_underflow_fp16",
        "blocks.2.attn",
        findings="NAN SCALE_COLLAPSE",
        hazards="constant_lost",
        shows=lambda run: run.stuck,
    ),
    *planted(
        silent_speaker_in_a_mixture,
        "eps_underflow_fp16",
        "op:log10",
        "op:add",
        findings="INF SCALE_COLLAPSE",
        hazards="constant_lost",
        examined=4,
        shows=lambda run: run.stuck,
    ),
    *planted(
        noisy_or_of_forty_tiles,
        "product_underflow_fp16",
        "pool",
        findings="INF SCALE_COLLAPSE",
        hazards="zero_divisor",
        shows=lambda run: run.stuck,
    ),
    *planted(
        likelihood_as_a_product,
        "product_underflow_fp16",
        "op:mul",
        "op:log",
        findings="INF SCALE_COLLAPSE",
        hazards="zero_divisor",
        shows=lambda run: run.stuck,
    ),
]
