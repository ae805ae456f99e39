"""Networks with one planted fault each, unlike those of `diff_gallery`: inside real architectures, in losses, in backward.

`FAULTS[name]` is (make, dtypes, policy, culprits): `make()` gives model, input, loss function and target; any of `culprits` is a
right answer for the first culprit.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from diff.diff_gallery import Block, Transformer, _ids, _noise, _token_loss


def _class_loss(out, y):
    return F.cross_entropy(out, y)


class HandNorm(nn.Module):
    """Squares in the type of its input: beyond 256 they are infinite in fp16, and rsqrt(inf) is 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class LoudStream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.block = nn.Sequential(HandNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = self.embed(x) * 400
        return self.head(self.block(x))


def norm_squares():
    return LoudStream(), _noise(8, 16) * 3, _class_loss, _ids(5, 8)


def attention_logits():
    model, ids = Transformer(3), _ids(50, 4, 16)
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[:64].mul_(400)
    return model, ids, _token_loss, ids


class Smoother(nn.Module):
    """A running mean over 200 time steps, kept in the type of its input."""

    def forward(self, x):
        state, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = state * 0.99 + x[:, t] * 0.01
            out.append(state)
        return torch.stack(out, 1)


class Series(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.smooth, self.head = nn.Linear(4, 8), Smoother(), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.smooth(self.up(x))[:, -1])


def running_mean():
    return Series(), _noise(6, 200, 4) + 1, F.mse_loss, _noise(6, 2)


def _squares_in_half(out, y):
    return ((out.half() - y.half()) ** 2).mean()


def loss_out_of_range():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    return model, _noise(8, 16), _squares_in_half, _noise(8, 3) * 500


class OwnExp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.rate = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return torch.log(self.rate(torch.tanh(self.body(x))).mul(30).exp() + 1)


def exp_in_the_root():
    return OwnExp(), _noise(8, 16), F.mse_loss, _noise(8, 4).abs()


class Slope(nn.Module):
    """A finite difference with a step that the format can hardly tell from nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x):
        x = x.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else x
        return (self.field(x + 0.004) - self.field(x)) / 0.004


class Physics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.slope, self.head = nn.Linear(4, 16), Slope(16), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.slope(self.lift(x)))


def finite_difference():
    return Physics(), _noise(8, 4), F.mse_loss, _noise(8, 2)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.norm(self.up(x)))


def layernorm_rows():
    """The CPU kernel sums the gradients of the affine parameters in bf16: with 8000 rows most of them are swallowed."""
    model, x = Rows(), _noise(8000, 4)
    nn.init.constant_(model.head.weight, 0.3)
    return model, x, (lambda out, y: (out * y).sum() / 100), torch.ones(8000, 2)


class OffsetHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32))
        self.head = nn.Linear(32, 20)
        nn.init.constant_(self.head.bias, 250.0)

    def forward(self, x):
        return self.head(self.body(x))


def logits_far_from_zero():
    return OffsetHead(), _noise(16, 16), _class_loss, _ids(20, 16)


class Rotation(nn.Module):
    def forward(self, x):
        position = torch.arange(30000, 30000 + x.shape[1], device=x.device).to(x.dtype)
        rates = (10000.0 ** (-torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])).to(x.dtype)
        angle = position[:, None] * rates
        a, b = x[..., ::2], x[..., 1::2]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.q, self.k, self.v = nn.Embedding(40, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.rope, self.head = Rotation(), nn.Linear(32, 40)

    def forward(self, ids):
        x = self.token(ids)
        q, k = self.rope(self.q(x)), self.rope(self.k(x))
        return self.head((q @ k.transpose(-2, -1) / math.sqrt(8)).softmax(-1) @ self.v(x))


def far_positions():
    ids = _ids(40, 4, 24)
    return Rotary(), ids, _token_loss, ids


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 8)
        nn.init.constant_(self.gate.bias, 60.0)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x):
        chosen = self.gate(x).topk(1, -1).indices
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            picked = (chosen[:, 0] == i).to(x.dtype)[:, None]
            out = out + picked * expert(x)
        return out


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.moe, self.head = nn.Linear(8, 16), Experts(), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.moe(F.gelu(self.lift(x))))


def router_in_half():
    return Routed(), _noise(200, 8), _class_loss, _ids(4, 200)


class Chain(nn.Module):
    """The probability of a path as a product of 24 factors, then its logarithm."""

    def forward(self, x):
        return torch.log(torch.sigmoid(x).prod(-1, keepdim=True))


class Likelihood(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.chain, self.last = nn.Linear(16, 24), Chain(), nn.Linear(1, 1)

    def forward(self, x):
        return self.last(self.chain(self.first(x) - 2))


def product_of_probabilities():
    return Likelihood(), _noise(8, 16), F.mse_loss, _noise(8, 1)


class Standardise(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0) + 1e-8)


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        with torch.no_grad():
            self.first.weight[3] = 0
        self.standard, self.last = Standardise(), nn.Linear(24, 4)

    def forward(self, x):
        return self.last(self.standard(self.first(x)))


def constant_feature():
    return Constant(), _noise(8, 16), _class_loss, _ids(4, 8)


class Pairwise(nn.Module):
    """A distance whose gradient is infinite where fp16 has rounded the sum of squares to 0."""

    def forward(self, a, b):
        return ((a - b).pow(2).sum(-1) * 1e-7 + 1e-10).sqrt() * 1e3


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.distance = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)), Pairwise()

    def forward(self, a, b):
        return self.distance(self.tower(a), self.tower(b))


def distance_backward():
    a = _noise(8, 16)
    b = a + _noise(8, 16).flip(0) * 0.01
    return Siamese(), (a, b), (lambda out: out.float().square().mean()), None


class Counter(nn.Module):
    """Positions as a running count of the tokens that are no padding, in the type of the activations."""

    def forward(self, x):
        count = torch.ones_like(x[..., :1]).cumsum(1)
        return x + torch.sin(count * 0.5)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.positions = nn.Linear(4, 8), Counter()
        self.mix, self.head = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 2)

    def forward(self, x):
        x = self.positions(self.lift(x))
        return self.head(self.mix(x.transpose(1, 2)).transpose(1, 2))


def counted_positions():
    return Counted(), _noise(2, 700, 4), F.mse_loss, _noise(2, 700, 2)


class Inflated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.gate = nn.Conv2d(8, 8, 1)
        self.up = nn.Conv2d(8, 8, 1)
        self.glu = Gated()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        h = F.relu(self.stem(x))
        return self.head(self.glu(self.gate(h) * 300, self.up(h) * 300).mean((2, 3)))


class Gated(nn.Module):
    def forward(self, gate, up):
        return F.silu(gate) * up / 90000


def gated_product():
    return Inflated(), _noise(4, 3, 8, 8) * 3, _class_loss, _ids(4, 4)


def _dice(out, y):
    p = out.sigmoid()
    return 1 - (2 * (p * y).sum() + 1e-6) / (p.sum() + y.sum() + 1e-6)


def dice_in_half():
    """Sums of 90,000 probabilities in fp16: infinite, and x / inf pins the loss at 1 without any gradient."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))
    nn.init.constant_(model[2].bias, 3.0)
    y = (_noise(2, 1, 256, 256) > -1).half()
    return model, _noise(2, 1, 256, 256), _dice, y


class WideResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block(32, 4, 0.0) for _ in range(3))
        self.shift = Shift()
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 6)

    def forward(self, x):
        x = self.lift(x)
        for i, block in enumerate(self.blocks):
            x = block(x) if i != 1 else self.shift(block(x))
        return self.head(self.norm(x)[:, 0])


class Shift(nn.Module):
    """All channels get a large common part, which the last norm takes out again."""

    def forward(self, x):
        return (x + 600.0).to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else x + 600.0


def loud_residual_stream():
    return WideResidual(), _noise(4, 6, 16), _class_loss, _ids(6, 4)


class OffsetScores(nn.Module):
    """Softmax does not care for the 500, the format does; the scores are no module's output."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(-2, -1) + 500.0
        return self.o(scores.softmax(-1) @ self.v(x))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.attn, self.head = nn.Linear(8, 16), OffsetScores(), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.attn(self.lift(x)).mean(1))


def offset_between_layers():
    return Attending(), _noise(6, 10, 8) * 3, _class_loss, _ids(4, 6)


class Centring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.body, self.head = nn.Embedding(30, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, ids):
        h = self.body(self.token(ids)) + 300
        return self.head((h - h.mean(1, keepdim=True))[:, 0])


def offset_in_the_root():
    return Centring(), _ids(30, 8, 6), _class_loss, _ids(5, 8)


def _bce(out, y):
    return F.binary_cross_entropy(out.sigmoid()[:, 0], y)


def saturated_probabilities():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    nn.init.constant_(model[2].bias, 9.0)
    return model, _noise(32, 8), _bce, (_noise(32) > 0).float()


class Biased(nn.Module):
    """The batch norm takes the 800 out again, but bf16 has stored the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)
        nn.init.constant_(self.conv.bias, 800.0)

    def forward(self, x):
        return self.head(F.relu(self.bn(self.conv(x))).mean((2, 3)))


def bias_before_norm():
    return Biased(), _noise(8, 3, 8, 8), _class_loss, _ids(4, 8)


def embedding_rows():
    """Three rows get 4000 gradients, summed in bf16."""
    model = nn.Sequential()
    model.add_module("table", nn.Embedding(3, 8))
    model.add_module("head", nn.Linear(8, 2))
    return model, _ids(3, 4000), (lambda out, y: (out.float() * y).sum() / 100), torch.ones(4000, 2)


def _tiny_squares(out, y):
    return ((out.half().exp() * 1e-5) ** 2).sum() * 1e10


def loss_below_the_range():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)), _noise(16, 8), _tiny_squares, _noise(16, 4)


def _focal(out, y):
    p = out.softmax(-1).gather(1, y[:, None])[:, 0]
    return (-((1 - p) ** 2) * torch.log(p)).mean()


def focal_loss():
    """Probabilities below the range of fp16 are 0, and their logarithm is infinite."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        model[2].weight.mul_(60)
    return model, _noise(32, 16), _focal, _ids(10, 32)


def _contrastive(out, y):
    z = F.normalize(out, dim=-1)
    similar = (z @ z.t() / 0.05).exp()
    return -(similar.diagonal() / similar.sum(-1)).log().mean()


def contrastive_loss():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), _noise(8, 16), _contrastive, _ids(3, 8)


class MaskedRow(nn.Module):
    """A mask of -1e5 is -inf in fp16, and a row of nothing else has no softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, mask):
        scores = self.q(x) @ self.k(x).transpose(-2, -1) / 4
        return (scores + (mask - 1.0).to(scores.dtype)[:, None, :] * 1e5).softmax(-1) @ self.v(x)


class Masking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.attn, self.head = nn.Linear(8, 16), MaskedRow(), nn.Linear(16, 3)

    def forward(self, x, mask):
        return self.head(self.attn(self.lift(x), mask).mean(1))


def masked_row():
    mask = torch.ones(4, 6)
    mask[2] = 0
    return Masking(), (_noise(4, 6, 8), mask), _class_loss, _ids(3, 4)


FAULTS = {
    "norm squares": (norm_squares, ("fp16",), "native", ("block.0",)),
    "attention logits": (attention_logits, ("fp16",), "native", ("blocks.1.attn",)),
    "running mean": (running_mean, ("bf16",), "native", ("smooth",)),
    "loss out of range": (loss_out_of_range, ("fp16",), "native", ("op:pow", "op:square")),
    "exp in the root": (exp_in_the_root, ("fp16",), "native", ("op:exp",)),
    "finite difference": (finite_difference, ("bf16", "fp16"), "native", ("slope",)),
    "layernorm rows": (layernorm_rows, ("bf16",), "native", ("norm", "norm.bias", "norm.weight")),
    "logits far from zero": (logits_far_from_zero, ("bf16",), "native", ("head",)),
    "far positions": (far_positions, ("bf16", "fp16"), "full", ("rope",)),
    "router in half": (router_in_half, ("bf16",), "native", ("moe", "moe.gate")),
    "product of probabilities": (product_of_probabilities, ("fp16",), "full", ("chain",)),
    "constant feature": (constant_feature, ("fp16",), "native", ("standard",)),
    "distance backward": (distance_backward, ("fp16",), "native", ("distance",)),
    "counted positions": (counted_positions, ("bf16",), "native", ("positions",)),
    "gated product": (gated_product, ("fp16",), "native", ("glu",)),
    "dice in half": (dice_in_half, ("fp16",), "native", ("op:sum",)),
    "loud residual stream": (loud_residual_stream, ("bf16", "fp16"), "native", ("shift",)),
    "offset between layers": (offset_between_layers, ("bf16",), "native", ("attn",)),
    "offset in the root": (offset_in_the_root, ("bf16", "fp16"), "native", ("op:add",)),
    "saturated probabilities": (saturated_probabilities, ("bf16", "fp16"), "native", ("op:sigmoid", "op:binary_cross_entropy")),
    "bias before a norm": (bias_before_norm, ("bf16",), "native", ("conv",)),
    "embedding rows": (embedding_rows, ("bf16",), "full", ("table.weight", "table")),
    "loss below the range": (loss_below_the_range, ("fp16",), "native", ("op:mul", "op:pow")),
    "focal loss": (focal_loss, ("fp16",), "native", ("op:log", "op:softmax")),
    "contrastive loss": (contrastive_loss, ("fp16",), "native", ("op:exp",)),
    "masked row": (masked_row, ("fp16",), "native", ("attn",)),
}
