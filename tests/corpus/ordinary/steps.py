"""Ordinary training steps of many kinds, in bf16 and in fp16 with a GradScaler: nothing is to be said."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.checkpoint import checkpoint

from corpus import BF16, BOTH, FP16, Training, healthy
from corpus.architectures import Between, Block
from corpus.draws import noise, seed_torch, whole
from corpus.loops import adamw, low, repeated
from corpus.ordinary.networks import convnet


class Lstm(nn.Module):
    """By hand: oneDNN has no 16-bit LSTM on every CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(30, 16), nn.LSTMCell(16, 16), nn.Linear(16, 30)

    def forward(self, ids: Tensor) -> Tensor:
        x, state, out = self.embed(ids), None, []
        for t in range(ids.shape[1]):
            state = self.cell(x[:, t], state)
            out.append(self.head(state[0]))
        return torch.stack(out, 1)


def lstm(dtype: torch.dtype = BF16) -> Training:
    seed_torch(0)
    model, ids = Lstm(), whole(30, 8, 12)
    return repeated(model, lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()), dtype, adamw)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            weights = self.gate(x.float()).softmax(-1)
        top, index = weights.topk(2, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, slot = (index == e).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, (expert(x[rows]) * top[rows, slot, None]).to(x.dtype))
        return out


def mixture_of_experts(dtype: torch.dtype = BF16) -> Training:
    model = Between(Mixture())
    x, y = noise(64, 16), noise(64, 4, key=2)
    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype, adamw)


def adversarial_pair(dtype: torch.dtype = BF16) -> Training:
    seed_torch(0)
    model = nn.ModuleDict({
        "g": nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2)),
        "d": nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)),
    })  # fmt: skip
    g, d = (torch.optim.Adam(model[k].parameters(), lr=2e-3) for k in "gd")
    scaler = GradScaler("cpu", init_scale=1024.0, enabled=dtype == FP16)
    real, latent = noise(32, 2) * 0.5 + 1, noise(32, 4, key=5)

    def step(i):
        d.zero_grad()
        with low(dtype):
            fake = model["g"](latent)
            right, wrong = model["d"](real), model["d"](fake.detach())
            loss = F.binary_cross_entropy_with_logits(right, torch.ones_like(right)) + F.softplus(wrong).mean()
        scaler.scale(loss).backward()
        scaler.step(d)
        g.zero_grad()
        with low(dtype):
            loss = F.softplus(-model["d"](fake)).mean()
        scaler.scale(loss).backward()
        scaler.step(g)
        scaler.update()

    return Training(model, [g, d], step, scaler if dtype == FP16 else None)


def contrastive_pairs(dtype: torch.dtype = BF16) -> Training:
    seed_torch(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    x = noise(32, 16)

    def loss():
        a, b = (F.normalize(model(x + 0.1 * noise(32, 16, key=s)).float(), dim=-1) for s in (5, 6))
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(32))

    return repeated(model, loss, dtype, adamw)


def diffusion_of_vectors(dtype: torch.dtype = BF16) -> Training:
    seed_torch(0)

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.net = nn.Linear(16, 32), nn.Sequential(nn.Linear(48, 64), nn.SiLU(), nn.Linear(64, 16))

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            angles = t[:, None].float() * torch.exp(-math.log(1e4) * torch.arange(8) / 8)
            return self.net(torch.cat([x, self.time(torch.cat([angles.sin(), angles.cos()], -1))], -1))

    model, x0, t = Denoiser(), noise(32, 16), whole(1000, 32)
    keep = torch.cos(t / 1000 * math.pi / 2)[:, None]

    def loss():
        drawn = torch.randn_like(x0)
        return F.mse_loss(model(keep * x0 + (1 - keep**2).sqrt() * drawn, t).float(), drawn)

    return repeated(model, loss, dtype, adamw)


def causal_attention_with_minus_infinity(dtype: torch.dtype = BF16) -> Training:
    seed_torch(0)

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.qkv, self.head = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 20)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = q @ k.transpose(-2, -1) / 4
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            return self.head(x + scores.masked_fill(hidden, -math.inf).softmax(-1) @ v)

    model, ids = Causal(), whole(20, 4, 10)
    return repeated(model, lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()), dtype, adamw)


def padding_with_a_large_negative_number(dtype: torch.dtype = BF16) -> Training:
    """-1e9 is -inf in fp16; no row is masked throughout, so that nothing happens."""
    seed_torch(0)
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[:, 5:] = True

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = q @ k.transpose(-2, -1) / 4 + mask[:, None].to(q.dtype) * -1e9
            return self.head(scores.softmax(-1) @ v)

    model, x, y = Padded(), noise(4, 8, 16), noise(4, 8, 4, key=2)
    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype, adamw)


def fused_attention_and_checkpointing(dtype: torch.dtype = BF16) -> Training:
    seed_torch(0)

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.ModuleDict({"qkv": nn.Linear(16, 48), "out": nn.Linear(16, 16)}) for _ in range(2))
            self.head = nn.Linear(16, 4)

        def _block(self, block: nn.ModuleDict, x: Tensor) -> Tensor:
            q, k, v = (t.view(*t.shape[:2], 2, 8).transpose(1, 2) for t in block["qkv"](x).chunk(3, -1))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            return x + F.dropout(block["out"](attended), 0.1)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(self._block, block, x, use_reentrant=False)
            return self.head(x)

    model, x, y = Fused(), noise(2, 8, 16), noise(2, 8, 4, key=2)
    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype, adamw)


def graph(dtype: torch.dtype = BF16) -> Training:
    seed_torch(0)

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message, self.update, self.head = nn.Linear(16, 16), nn.Linear(32, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
            for _ in range(2):
                sent = self.message(x)[source]
                got = torch.zeros_like(x, dtype=sent.dtype).index_add(0, target, sent)
                x = F.relu(self.update(torch.cat([x, got.to(x.dtype)], -1)))
            return self.head(x)

    model, x, y = Graph(), noise(40, 16), whole(3, 40)
    source, target = whole(40, 160, key=5), whole(40, 160, key=6)
    return repeated(model, lambda: F.cross_entropy(model(x, source, target), y), dtype, adamw)


def flow_of_couplings(dtype: torch.dtype = BF16) -> Training:
    seed_torch(0)

    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets = nn.ModuleList(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logdet = x.new_zeros(len(x))
            for net in self.nets:
                a, b = x.chunk(2, -1)
                shift, scale = net(a).float().chunk(2, -1)
                scale = torch.tanh(scale)
                x, logdet = torch.cat([b * scale.exp() + shift, a], -1), logdet + scale.sum(-1)
            return x, logdet

    model, x = Coupling(), noise(64, 8)

    def loss():
        z, logdet = model(x)
        return (0.5 * z.square().sum(-1) - logdet).mean()

    return repeated(model, loss, dtype, adamw)


def policy_gradient(dtype: torch.dtype = BF16) -> Training:
    seed_torch(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    old = copy.deepcopy(model)
    x, actions, advantage = noise(64, 8), whole(4, 64), noise(64, key=7)
    advantage = (advantage - advantage.mean()) / advantage.std()

    def logs(net: nn.Module) -> Tensor:
        return net(x).float().log_softmax(-1).gather(1, actions[:, None]).squeeze(1)

    def loss():
        with torch.no_grad():
            before = logs(old)
        ratio = (logs(model) - before).exp()
        return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    return repeated(model, loss, dtype, adamw)


def detection_with_boxes(dtype: torch.dtype = BF16) -> Training:
    seed_torch(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 5, 3, padding=1))
    x, boxes, seen = noise(4, 3, 8, 8), noise(4, 4, 8, 8, key=5), (noise(4, 8, 8, key=6) > 1).float()

    def loss():
        out = model(x)
        found = F.binary_cross_entropy_with_logits(out[:, 4], seen)
        return found + (F.smooth_l1_loss(out[:, :4].float(), boxes, reduction="none").sum(1) * seen).sum() / seen.sum()

    return repeated(model, loss, dtype, adamw)


def accumulated_and_clipped(dtype: torch.dtype = BF16) -> Training:
    seed_torch(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer, scaler = adamw(model.parameters()), GradScaler("cpu", init_scale=1024.0, enabled=dtype == FP16)

    def step(i):
        optimizer.zero_grad()
        for i in range(4):
            with low(dtype):
                loss = F.mse_loss(model(noise(16, 16, key=i)).float(), noise(16, 4, key=i + 9)) / 4
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()

    return Training(model, optimizer, step, scaler if dtype == FP16 else None)


def average_of_weights_in_fp32(dtype: torch.dtype = BF16) -> Training:
    seed_torch(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    mean = copy.deepcopy(model)
    x, y = noise(16, 16), noise(16, 4, key=2)

    def average():
        with torch.no_grad():
            for a, p in zip(mean.parameters(), model.parameters()):
                a.mul_(0.9999).add_(p, alpha=0.0001)

    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype, adamw, after=average)


def weights_in_low_precision_that_move(dtype: torch.dtype = BF16) -> Training:
    seed_torch(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
    x, y = noise(64, 16).to(dtype), noise(64, 4, key=2)
    return repeated(
        model, lambda: F.mse_loss(model(x).float(), y), None, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9), scaled=False
    )


def master_weights(dtype: torch.dtype = BF16) -> Training:
    """Weights in 16 bits are copies of FP32 masters: most do not change in a step, and nothing is lost."""
    seed_torch(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-5)
    x, y = noise(64, 16).to(dtype), noise(64, 4, key=2)

    def step(i):
        model.zero_grad()
        F.mse_loss(model(x).float(), y).backward()
        for master, p in zip(masters, model.parameters()):
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters()):
                p.copy_(master)

    return Training(model, optimizer, step)


def frozen_and_unused_parts(dtype: torch.dtype = BF16) -> Training:
    seed_torch(0)
    model = nn.ModuleDict({"frozen": nn.Linear(16, 16), "used": nn.Linear(16, 4), "unused": nn.Linear(4, 4)})
    model["frozen"].requires_grad_(False)
    x, y = noise(16, 16), noise(16, 4, key=2)
    return repeated(model, lambda: F.mse_loss(model["used"](model["frozen"](x).relu()).float(), y), dtype, adamw)


def zero_initialised_branches(dtype: torch.dtype = BF16) -> Training:
    seed_torch(0)

    class Fixup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(16, 2) for _ in range(2))
            self.gates = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(2))
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            for gate, block in zip(self.gates, self.blocks):
                x = x + gate * block(x)
            return self.head(x)

    model, x, y = Fixup(), noise(4, 6, 16), noise(4, 6, 4, key=2)
    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype, adamw)


def regression_with_pixels_and_counts(dtype: torch.dtype = BF16) -> Training:
    """Whole numbers up to 255 and a feature of a few thousand: rounded to three digits, which is what bf16 is."""
    seed_torch(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    x = torch.cat([whole(256, 64, 7).float() / 255, whole(4000, 64, 1, key=8).float() / 1000], -1)
    y = x.sum(-1, keepdim=True)
    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype, adamw)


def accuracy_is_counted_inside_the_step(dtype: torch.dtype = BF16) -> Training:
    seed_torch(0)
    model, x, y = Between(nn.ReLU(), outputs=10), noise(64, 16), whole(10, 64)

    def loss():
        logits = model(x)
        (logits.argmax(-1) == y).float().mean().item()
        return F.cross_entropy(logits, y, label_smoothing=0.1)

    return repeated(model, loss, dtype, adamw)


def scale_still_too_high(dtype: torch.dtype = BF16) -> Training:
    """The first steps of a GradScaler overflow in backward until it has found its level."""
    program = convnet(dtype)
    if program.scaler is not None:
        program.scaler._init_scale = 2.0**24
        program.scaler._scale = None
    return program


PROGRAMS = [
    *healthy(lstm, dtypes=BOTH, steps=8),
    *healthy(mixture_of_experts, dtypes=BOTH, steps=8),
    *healthy(adversarial_pair, dtypes=BOTH, steps=8),
    *healthy(contrastive_pairs, dtypes=BOTH, steps=8),
    *healthy(diffusion_of_vectors, dtypes=BOTH, steps=8),
    *healthy(causal_attention_with_minus_infinity, dtypes=BOTH, steps=8),
    *healthy(padding_with_a_large_negative_number, dtypes=BOTH, steps=8),
    *healthy(fused_attention_and_checkpointing, dtypes=BOTH, steps=8),
    *healthy(graph, dtypes=BOTH, steps=8),
    *healthy(flow_of_couplings, dtypes=BOTH, steps=8),
    *healthy(policy_gradient, dtypes=BOTH, steps=8),
    *healthy(detection_with_boxes, dtypes=BOTH, steps=8),
    *healthy(accumulated_and_clipped, dtypes=BOTH, steps=8),
    *healthy(average_of_weights_in_fp32, dtypes=BOTH, steps=8),
    *healthy(weights_in_low_precision_that_move, dtypes=BOTH, steps=8),
    *healthy(master_weights, dtypes=BOTH, steps=8),
    *healthy(frozen_and_unused_parts, dtypes=BOTH, steps=8),
    *healthy(zero_initialised_branches, dtypes=BOTH, steps=8),
    *healthy(regression_with_pixels_and_counts, dtypes=BOTH, steps=8),
    *healthy(accuracy_is_counted_inside_the_step, dtypes=BOTH, steps=8),
    *healthy(scale_still_too_high, dtypes=BOTH, steps=8),
]
