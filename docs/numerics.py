"""Measures every number that docs/numerics.md marks as measured: `python docs/numerics.py [SECTION ...]`.

One function per section of the page, named like its anchor. CPU only, about a minute for all of them.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}
ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8}


def say(what: str, *values: object) -> None:
    print(f"  {what}: " + ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values))


def rel_l2(low: torch.Tensor, exact: torch.Tensor) -> float:
    return float((low.double() - exact.double()).norm() / exact.double().norm())


def formats() -> None:
    every = LOW | {"fp8 e4m3": torch.float8_e4m3fn, "fp8 e5m2": torch.float8_e5m2}
    for name, dtype in every.items():
        info = torch.finfo(dtype)
        smallest = info.tiny * info.eps
        above = torch.tensor([info.max * (1 + f * info.eps / 4) for f in (0.5, 0.99, 1.01, 8)]).to(dtype).float()
        halves = torch.tensor([smallest * 0.5, smallest * 0.5001], dtype=torch.float64).to(dtype).double()
        whole = torch.arange(1, 5000.0)
        kept = whole.to(dtype).float() == whole
        exact = int(kept.logical_not().nonzero()[0]) if not bool(kept.all()) else 5000
        say(f"{name} max, min normal, min subnormal, eps", info.max, info.tiny, smallest, info.eps)
        say(f"{name} half of the smallest, and a little more, become", *(float(v) for v in halves))
        say(f"{name} casts of just above max and far above", *(float(v) for v in above))
        say(f"{name} whole numbers exact up to", exact)
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    for name, dtype in LOW.items():
        say(f"{name} relative L2 of one cast, in roundoffs", rel_l2(x.to(dtype), x) / ROUNDOFF[name])
        bits = torch.frexp(x.to(dtype).float()).mantissa.abs() / ROUNDOFF[name] % 2
        say(f"{name} share of rounded numbers whose last bit is set", float(bits.mean()))
    say("exp overflows above (fp16, bf16)", math.log(65504), math.log(torch.finfo(torch.bfloat16).max))
    for dtype, ends in {
        torch.float16: (65519.0, 65520.0),
        torch.bfloat16: (3.396e38, 3.397e38),
        torch.float8_e5m2: (61439.0, 61440.0),
    }.items():
        say(f"{dtype} casts of {ends}", *torch.tensor(ends).to(dtype).float().tolist())


def energy() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.exp(torch.randn(1_000_000, generator=g, dtype=torch.float64) * 3) * 1e-7  # log-normal, median 1e-7
    total = float(x.square().sum())
    gone = x <= 2.0**-25
    say(
        "log-normal, median 1e-7, sigma 3: below 2^-24, flushed to 0",
        float((x < 2.0**-24).double().mean()),
        float(gone.double().mean()),
    )
    say("their share of the energy", float(x[gone].square().sum()) / total)
    for low, high in ((-24, -23), (-22, -21), (-20, -19), (-17, -16), (-15, -14)):
        grid = torch.logspace(low, high, 10_001, base=2, dtype=torch.float64)[:-1]
        say(f"relative L2 error of a cast between 2^{low} and 2^{high}", rel_l2(grid.half(), grid))


def normal_error() -> None:
    g = torch.Generator().manual_seed(0)
    layer = nn.Linear(512, 512, bias=False)
    nn.init.normal_(layer.weight, std=512**-0.5, generator=g)
    x = torch.randn(256, 512, generator=g)
    for name, dtype in LOW.items():
        exact = F.linear(x.double(), layer.weight.double())
        off = (F.linear(x.to(dtype), layer.weight.to(dtype)).double() - exact).abs() / exact.abs()
        say(f"Linear 512 x 512 in {name}: relative L2", rel_l2(F.linear(x.to(dtype), layer.weight.to(dtype)), exact))
        say(
            "  elements off by more than 1 %, 10 %, worst",
            *((off > s).double().mean().item() for s in (0.01, 0.1)),
            off.max().item(),
        )
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(24)]
    for name, dtype in LOW.items():
        exact = torch.randn(32, 128)
        low, errors = exact.to(dtype), []
        with torch.no_grad():
            for block in blocks:
                exact = exact + block(exact)
                low = low + block.to(dtype)(low)
                block.float()
                errors.append(rel_l2(low, exact) / ROUNDOFF[name])
        say(f"residual blocks in {name}, in roundoffs, after 1, 6, 24", errors[0], errors[5], errors[23])
    for n in (4096, 1_000_000):
        ratios = [float(v.max() / v.min()) for v in (torch.randn(n, generator=g).abs() for _ in range(51))]
        say(f"max / min of {n} Gaussian numbers, median of 51 tensors", sorted(ratios)[25])


def common_offset() -> None:
    x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    for offset in (0.0, 10.0, 100.0, 1000.0):
        y = x + offset
        low = y.bfloat16()
        centred = float((low.double() - y).norm() / (y - y.mean(0)).norm())
        rms = float(y.square().mean().sqrt())
        spacing = 2.0 ** (math.floor(math.log2(rms)) - 7)
        say(
            f"bf16, offset {offset:g}: plain, centred error, spacing / std",
            rel_l2(low, y),
            centred,
            spacing / float(y.std(0).mean()),
        )
    for name, make in healthy_models().items():
        plain, apart = [], []
        for seed in range(5):
            torch.manual_seed(seed)
            model, data = make()
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                low = model(data)
            with torch.no_grad():
                exact = model(data)
            plain.append(rel_l2(low, exact))
            apart.append(float((low - exact).norm() / (exact - exact.mean(0)).norm()))
        say(f"{name} in bf16, its outputs, largest of 5 seeds: plain, centred error", max(plain), max(apart))


def whole_numbers() -> None:
    for name, dtype in LOW.items():
        for n in (512, 1024, 4096, 50_000):
            say(f"{name}: distinct of 0..{n - 1}", len(torch.arange(float(n)).to(dtype).unique()))
    for dtype in LOW.values():
        position = torch.arange(8192, dtype=torch.float64)
        off = (position.to(dtype).double() - position).abs()
        say(
            f"{dtype}: phase error in radians at frequency 1 below position 256, 1024, 8192",
            *(float(off[:n].max()) for n in (256, 1024, 8192)),
        )


def sums() -> None:
    for name, dtype in LOW.items():
        one = torch.ones((), dtype=dtype)
        acc = torch.zeros((), dtype=dtype)
        for _ in range(4096):
            acc = acc + one
        ones = torch.ones(4096, dtype=dtype)
        say(
            f"{name}: 4096 ones, added in a loop; sum; cumsum; dot",
            float(acc),
            float(ones.sum()),
            float(ones.cumsum(0)[-1]),
            float(ones @ ones),
        )
        table = torch.zeros(2, 4, dtype=dtype, requires_grad=True)
        F.embedding(torch.zeros(4096, dtype=torch.long), table).sum().backward()
        say(f"{name}: gradient of an embedding row used 4096 times", float(table.grad[0, 0]))
        added = torch.zeros(1, dtype=dtype).index_add(0, torch.zeros(4096, dtype=torch.long), ones)
        say(f"{name}: index_add of 4096 ones, 1-D", float(added))
        for threads in (1, 2):
            torch.set_num_threads(threads)
            norm = nn.LayerNorm(8).to(dtype)
            norm(torch.randn(4096, 8).to(dtype)).sum().backward()
            say(f"{name}: LayerNorm bias gradient over 4096 rows, {threads} threads", float(norm.bias.grad[0]))
        w = torch.zeros(1, dtype=dtype, requires_grad=True)
        for _ in range(600):
            w.sum().backward()
        say(f"{name}: .grad of 600 backward passes of 1", float(w.grad))
        g = torch.Generator().manual_seed(0)
        parts = (torch.randn(1024, 256, generator=g) * 0.5 + 1).to(dtype)
        total = torch.zeros(256, dtype=dtype)
        for part in parts:
            total = total + part
        say(
            f"{name}: 1024 micro-batch gradients of mean 1, std 0.5: share lost",
            1 - float(total.double().sum() / parts.double().sum()),
        )
    g = torch.Generator().manual_seed(0)
    small = torch.randn(20_000, generator=g)
    for ratio in (16.0, 64.0, 256.0, 1024.0):
        large = torch.rand(20_000, generator=g) * 0.5 * ratio + ratio * 0.75
        kept = (large + small).bfloat16().double() - large.double()
        say(f"bf16, an addend {ratio:g} times smaller: error over its rms, share swallowed whole",
            rel_l2(kept, small), float(((large.bfloat16() + small.bfloat16()) == large.bfloat16()).double().mean()))  # fmt: skip


def cancellation() -> None:
    g = torch.Generator().manual_seed(0)
    a = torch.rand(100_000, generator=g, dtype=torch.float64) + 1
    for name, dtype in LOW.items():
        for times in (1, 8, 64):
            gap = times * ROUNDOFF[name]
            b = a * (1 - gap)
            low = a.to(dtype).double() - b.to(dtype).double()
            say(f"{name}: a - b where they differ by {times} roundoffs: relative L2 error", rel_l2(low, a - b))


def autocast() -> None:
    x, y = torch.rand(8, 8) * 0.5 + 0.25, torch.rand(8, 8) * 0.5 + 0.25
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "softmax": lambda h: h.softmax(-1),
        "log_softmax": lambda h: h.log_softmax(-1),
        "layer_norm": lambda h: F.layer_norm(h, (8,)),
        "rms_norm": lambda h: F.rms_norm(h, (8,)),
        "exp": torch.exp,
        "log": torch.log,
        "pow": lambda h: h.pow(2),
        "rsqrt": torch.rsqrt,
        "sum": torch.sum,
        "cumsum": lambda h: h.cumsum(0),
        "mean": torch.mean,
        "sqrt": torch.sqrt,
        "norm": torch.norm,
        "logsumexp": lambda h: h.logsumexp(-1),
        "softplus": F.softplus,
        "prod": torch.prod,
        "mse_loss": lambda h: F.mse_loss(h, h),
        "cross_entropy": lambda h: F.cross_entropy(h, torch.zeros(8, dtype=torch.long)),
        "binary_cross_entropy": lambda h: F.binary_cross_entropy(h, h.detach()),
    }
    with torch.autocast("cpu", torch.bfloat16):
        h = (x @ y / 8).clamp(0.1, 0.9)
        out = {name: str(call(h).dtype).removeprefix("torch.") for name, call in calls.items()}
    for kind in ("bfloat16", "float32"):
        say(f"CPU autocast, result in {kind}", *(name for name, dtype in out.items() if dtype == kind))


def loss_scaling() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    w = nn.Parameter(torch.ones(1))
    opt = torch.optim.SGD([w], lr=0.0)
    for _ in range(40):
        opt.zero_grad()
        scaler.scale(w.sum()).backward()
        w.grad.fill_(math.inf)
        scaler.step(opt)
        scaler.update()
    say("GradScaler after 40 overflows", scaler.get_scale())
    for start in (16, 24):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**start)
        skipped = 0
        for _ in range(40):
            x = torch.randn(64, 32)
            opt.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.mse_loss(model(x), x[:, :8])
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            skipped += scaler.get_scale() < before
        say(
            f"a healthy regression from 2^{start}: steps skipped, log2 of the scale afterwards",
            skipped,
            math.log2(scaler.get_scale()),
        )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def healthy_models() -> dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]]:
    def mlp(act: type[nn.Module]) -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), act(), nn.Linear(64, 64), act(), nn.Linear(64, 10))

    def cnn() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
                             nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))  # fmt: skip

    def transformer() -> nn.Module:
        return nn.Sequential(
            nn.Linear(32, 32), *(Block(32) for _ in range(4)), nn.LayerNorm(32), nn.Flatten(), nn.Linear(16 * 32, 10)
        )

    return {
        "MLP, tanh": lambda: (mlp(nn.Tanh), torch.randn(32, 32)),
        "MLP, GELU": lambda: (mlp(nn.GELU), torch.randn(32, 32)),
        "MLP, ReLU": lambda: (mlp(nn.ReLU), torch.randn(32, 32)),
        "CNN, ReLU": lambda: (cnn(), torch.randn(8, 3, 12, 12)),
        "transformer": lambda: (transformer(), torch.randn(8, 16, 32)),
    }


def gradients_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    model.zero_grad()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def gradients_beside_fp32() -> None:
    for name, make in healthy_models().items():
        for low, dtype in LOW.items():
            errors = []
            for seed in range(5):
                torch.manual_seed(seed)
                model, x = make()
                y = torch.randint(0, 10, (len(x),))
                exact = gradients_of(model, x, y, None)
                if low == "fp16":  # a loss scale, as one trains in fp16
                    model.zero_grad()
                    with torch.autocast("cpu", dtype):
                        loss = F.cross_entropy(model(x), y)
                    (loss * 1024).backward()
                    got = torch.cat([p.grad.flatten() for p in model.parameters()]) / 1024
                else:
                    got = gradients_of(model, x, y, dtype)
                errors.append(rel_l2(got, exact))
            say(f"{name} in {low}: error of the whole gradient over 5 seeds, smallest and largest", min(errors), max(errors))


def decisions() -> None:
    g = torch.Generator().manual_seed(0)
    for experts in (8, 64):
        w, x = torch.randn(experts, 64, generator=g) * 0.125, torch.randn(20_000, 64, generator=g)
        exact = x @ w.T
        for name, dtype in LOW.items():
            low = (x.to(dtype) @ w.to(dtype).T).float()
            top = low.topk(2).values
            flips, ties = low.argmax(1) != exact.argmax(1), top[:, 0] == top[:, 1]
            say(
                f"router over {experts} experts in {name}: choices that flip, ties",
                *(float(v.double().mean()) for v in (flips, ties)),
            )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1000))
    ids = torch.randint(0, 1000, (256, 32))
    data = torch.randn(256, 32, 64)

    def logp(dtype: torch.dtype | None, rows: int) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            out = torch.cat([model(part) for part in data.split(rows)])
            return out.to(torch.promote_types(out.dtype, torch.float32)).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)

    low = {"bf16": logp(torch.bfloat16, 256), "fp16": logp(torch.float16, 256), "fp32": logp(None, 256)}
    model, data = model.double(), data.double()
    base = logp(None, 256).double()
    for name, other in low.items():
        ratio = (other.double() - base).sum(1).exp()
        say(f"{name} beside fp64, ratio of the probabilities of 32 tokens: median |r - 1|", float((ratio - 1).abs().median()))


def updates() -> None:
    w = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)) * 0.02
    for name, dtype in LOW.items():
        for lr in (1e-4, 1e-5, 1e-6):
            stored = w.to(dtype)
            wanted = -lr * torch.sign(torch.randn(w.shape, generator=torch.Generator().manual_seed(1)))
            done = (stored.float() + wanted).to(dtype).float() - stored.float()
            kept = float((done.double() @ wanted.double()) / (wanted.double() @ wanted.double()))
            say(
                f"{name} weights N(0, 0.02), steps of {lr:g}: left bit-identical, share of the update that arrives",
                float((done == 0).double().mean()),
                kept,
            )
    values = torch.linspace(1, 2, 257)[:-1]
    for name, dtype in LOW.items():
        held = values.to(dtype).unique()
        stuck = {
            b: float(((held * torch.tensor(b)).to(dtype) == held).double().mean()) for b in (0.99, 0.996, 0.998, 0.999, 0.9999)
        }
        say(f"{name}: share of values v for which v * beta == v", *(f"{b}: {s:.2f}" for b, s in stuck.items()))


def adam() -> None:
    for kind in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        p = nn.Parameter(torch.ones(4, dtype=torch.float16))
        p.grad = torch.tensor([1e-4, -1e-4, 0.0, 1.0]).half()
        torch.optim.Adam([p], lr=1e-3, **kind).step()
        say(f"Adam, fp16 parameters, {kind}: after one step", p.tolist())
    p = nn.Parameter(torch.ones(1))
    with torch.autocast("cpu", torch.bfloat16):
        say(
            "eps of Adam made inside autocast; 1e-8 in fp16",
            torch.optim.Adam([p]).defaults["eps"],
            float(torch.tensor(1e-8).half()),
        )
    for ratio in (10.0, 1.0, 0.1):
        p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        opt = torch.optim.Adam([p], lr=1.0)
        p.grad = torch.full((1,), ratio * 1e-8, dtype=torch.float64)
        opt.step()
        say(f"sqrt(v) = {ratio:g} eps: length of a step over lr", abs(float(p)))
    for jump in (3.0, 5.0, 10.0, 100.0):
        p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        opt = torch.optim.Adam([p], lr=1.0, betas=(0.9, 0.999), eps=1e-12)
        sign = 1.0
        for _ in range(5000):
            p.grad = torch.full((1,), sign, dtype=torch.float64)
            sign = -sign
            opt.step()
        state = opt.state[p]
        before = float(p)
        surprise = jump / math.sqrt(float(state["exp_avg_sq"]))
        lengths = []
        for _ in range(50):
            p.grad = torch.full((1,), jump, dtype=torch.float64)
            opt.step()
            lengths.append(abs(float(p) - before))
            before = float(p)
        say(
            f"gradients of +-1, then {jump:g}: g / sqrt(v), the first step over lr, the longest of 50",
            surprise,
            lengths[0],
            max(lengths),
        )


def attention() -> None:
    g = torch.Generator().manual_seed(0)
    for std in (1, 5, 10, 20, 50):
        scores = torch.randn(2000, 256, generator=g) * std
        p = scores.softmax(-1)
        entropy = -(p * p.clamp_min(1e-30).log()).sum(-1) / math.log(256)
        say(
            f"scores of std {std} over 256 keys: largest score, normalised entropy (median)",
            float(scores.amax(-1).median()),
            float(entropy.median()),
        )
    x = torch.randn(10_000, generator=g)
    off = x.bfloat16().double() - x
    say("mean over standard deviation of 10,000 rounding errors", abs(float(off.mean() / off.std())))


def depth() -> None:
    def fade(make: Callable[[], nn.Module], layers: int) -> float:
        torch.manual_seed(0)
        model = make()
        model(torch.randn(64, 64)).square().mean().backward()
        rms = [float(p.grad.square().mean().sqrt()) for p in model.parameters() if p.ndim == 2]
        third = layers // 3
        return (sum(rms[:third]) / third) / (sum(rms[-third:]) / third)

    def stack(act: type[nn.Module], layers: int) -> nn.Module:
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts += [nn.Linear(64, 64), act()]
        if act is nn.ReLU:
            for part in parts[::2]:
                nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
        return nn.Sequential(*parts, nn.Linear(64, 4))

    for layers in (12, 24):
        say(f"{layers} layers: rms gradient of the first third over the last: sigmoid, tanh, ReLU with He init",
            *(fade(lambda act=act, n=layers: stack(act, n), layers) for act in (nn.Sigmoid, nn.Tanh, nn.ReLU)))  # fmt: skip
    say("1.15 ** 50", 1.15**50)
    torch.manual_seed(0)
    h, norms = torch.randn(256, 128), []
    for _ in range(24):
        block = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
        h = h + block(h).detach()
        norms.append(float(h.norm()))
    say("a residual stream at initialisation: growth per block, first and last", norms[1] / norms[0], norms[-1] / norms[-2])
    model = stack(nn.ReLU, 6)
    h, dead = torch.randn(512, 64), []
    for part in list(model)[:-1]:
        h = part(h)
        if isinstance(part, nn.ReLU):
            dead.append(float((h == 0).all(0).float().mean()))
    say("units that are off for all 512 inputs, He init, layers 1 to 6", *dead)


def own_history() -> None:
    g = torch.Generator().manual_seed(0)
    for spread in (0.3, 1.0):
        for n in (5, 20, 200):
            noise = torch.randn(200_000 if n < 200 else 20_000, n + 1, generator=g) * spread
            past, now = noise[:, :n], noise[:, n]
            median = past.median(1).values
            mad = 1.4826 * (past - median[:, None]).abs().median(1).values
            z, ratio = (now - median) / mad, (now - median).exp()
            say(f"log-normal norms, sigma {spread}, {n} steps of history: z > 6 by chance, and also 10 times the median",
                float((z > 6).double().mean()), float(((z > 6) & (ratio > 10)).double().mean()))  # fmt: skip
    x = torch.arange(5, dtype=torch.float64)
    y = torch.randn(200_000, 5, generator=g, dtype=torch.float64)
    xc, yc = x - x.mean(), y - y.mean(1, keepdim=True)
    r2 = (yc @ xc) ** 2 / (xc @ xc * yc.square().sum(1))
    say("5 points of noise that a line explains to 90 %", float((r2 > 0.9).double().mean()))
    gaps = torch.randn(100_000, 25, generator=g)
    error = 1.2533 * gaps.std(1) / 5
    say(
        "median of 25 gaps of pure noise beyond 5 standard errors",
        float((gaps.median(1).values.abs() > 5 * error).double().mean()),
    )


def one_operation() -> None:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(128, 256, generator=g), torch.randn(256, 256, generator=g) / 16
    for name, dtype in LOW.items():
        u = ROUNDOFF[name]
        a, b = x.to(dtype), w.to(dtype)
        exact = a.double() @ b.double()
        low = (a @ b).double()
        worst = float(((low - exact).abs() / (exact.abs() + exact.square().mean().sqrt())).max())
        say(
            f"matmul in {name} beside fp64 on the same inputs, in roundoffs: worst element, relative L2",
            worst / u,
            rel_l2(low, exact) / u,
        )
        biased = (exact * 1.01).to(dtype)
        say("the same with a bias of 1 %: relative L2 in roundoffs", rel_l2(biased, exact) / u)
    exact = x.double() @ w.double()
    worst = float((((x @ w).double() - exact).abs() / (exact.abs() + exact.square().mean().sqrt())).max())
    say("matmul in fp32, worst element in roundoffs", worst / 2.0**-24)
    for rows in (512, 8192):
        norm, exact_norm = nn.LayerNorm(64), nn.LayerNorm(64)
        data, weights = torch.randn(rows, 64, generator=g), torch.rand(rows, 64, generator=g)
        low_norm = norm.bfloat16()
        (low_norm(data.bfloat16()) * weights.bfloat16()).sum().backward()
        (exact_norm(data) * weights).sum().backward()
        say(
            f"LayerNorm bias gradient, bf16, {rows} rows, {torch.get_num_threads()} threads: relative L2",
            rel_l2(low_norm.bias.grad, exact_norm.bias.grad),
        )


SECTIONS = {f.__name__.replace("_", "-"): f for f in (
    formats, energy, normal_error, common_offset, whole_numbers, sums, cancellation, autocast, loss_scaling,
    gradients_beside_fp32, decisions, updates, adam, attention, depth, own_history, one_operation,
)}  # fmt: skip


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in names or SECTIONS:
        print(name)
        torch.manual_seed(0)
        SECTIONS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
