"""More ordinary training steps: graphs, flows, policies, detectors, and loops with habits of their own."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from diff.diff_gallery import Block
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from examine.sanitizer_healthy_models import HEALTHY, adamw, convnet, healthy, whole
from examine.sanitizer_programs import BF16, FP16, Between, Program, low, noise, training

LOW = {"bf16": BF16, "fp16": FP16}

__all__ = ["HEALTHY", "LOW"]


@healthy
def graph(dtype):
    torch.manual_seed(0)

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
    source, target = whole(40, 160, seed=5), whole(40, 160, seed=6)
    return training(model, lambda: F.cross_entropy(model(x, source, target), y), dtype, adamw)


@healthy
def flow(dtype):
    torch.manual_seed(0)

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

    return training(model, loss, dtype, adamw)


@healthy
def policy_gradient(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    old = copy.deepcopy(model)
    x, actions, advantage = noise(64, 8), whole(4, 64), noise(64, seed=7)
    advantage = (advantage - advantage.mean()) / advantage.std()

    def logs(net: nn.Module) -> Tensor:
        return net(x).float().log_softmax(-1).gather(1, actions[:, None]).squeeze(1)

    def loss():
        with torch.no_grad():
            before = logs(old)
        ratio = (logs(model) - before).exp()
        return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    return training(model, loss, dtype, adamw)


@healthy
def detection_with_boxes(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 5, 3, padding=1))
    x, boxes, seen = noise(4, 3, 8, 8), noise(4, 4, 8, 8, seed=5), (noise(4, 8, 8, seed=6) > 1).float()

    def loss():
        out = model(x)
        found = F.binary_cross_entropy_with_logits(out[:, 4], seen)
        return found + (F.smooth_l1_loss(out[:, :4].float(), boxes, reduction="none").sum(1) * seen).sum() / seen.sum()

    return training(model, loss, dtype, adamw)


@healthy
def accumulated_and_clipped(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer, scaler = adamw(model.parameters()), GradScaler("cpu", init_scale=1024.0, enabled=dtype == FP16)

    def step():
        optimizer.zero_grad()
        for i in range(4):
            with low(dtype):
                loss = F.mse_loss(model(noise(16, 16, seed=i)).float(), noise(16, 4, seed=i + 9)) / 4
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()

    return Program(model, step, scaler if dtype == FP16 else None)


@healthy
def average_of_weights_in_fp32(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    mean = copy.deepcopy(model)
    x, y = noise(16, 16), noise(16, 4, seed=2)

    def average():
        with torch.no_grad():
            for a, p in zip(mean.parameters(), model.parameters()):
                a.mul_(0.9999).add_(p, alpha=0.0001)

    return training(model, lambda: F.mse_loss(model(x).float(), y), dtype, adamw, after=average)


@healthy
def weights_in_low_precision_that_move(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
    x, y = noise(64, 16).to(dtype), noise(64, 4, seed=2)
    return training(
        model, lambda: F.mse_loss(model(x).float(), y), None, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9), scaled=False
    )


@healthy
def master_weights(dtype):
    """Weights in 16 bits are copies of FP32 masters: most do not change in a step, and nothing is lost."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-5)
    x, y = noise(64, 16).to(dtype), noise(64, 4, seed=2)

    def step():
        model.zero_grad()
        F.mse_loss(model(x).float(), y).backward()
        for master, p in zip(masters, model.parameters()):
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters()):
                p.copy_(master)

    return Program(model, step)


@healthy
def frozen_and_unused_parts(dtype):
    torch.manual_seed(0)
    model = nn.ModuleDict({"frozen": nn.Linear(16, 16), "used": nn.Linear(16, 4), "unused": nn.Linear(4, 4)})
    model["frozen"].requires_grad_(False)
    x, y = noise(16, 16), noise(16, 4, seed=2)
    return training(model, lambda: F.mse_loss(model["used"](model["frozen"](x).relu()).float(), y), dtype, adamw)


@healthy
def zero_initialised_branches(dtype):
    torch.manual_seed(0)

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

    model, x, y = Fixup(), noise(4, 6, 16), noise(4, 6, 4, seed=2)
    return training(model, lambda: F.mse_loss(model(x).float(), y), dtype, adamw)


@healthy
def regression_with_pixels_and_counts(dtype):
    """Whole numbers up to 255 and a feature of a few thousand: rounded to three digits, which is what bf16 is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    x = torch.cat([whole(256, 64, 7).float() / 255, whole(4000, 64, 1, seed=8).float() / 1000], -1)
    y = x.sum(-1, keepdim=True)
    return training(model, lambda: F.mse_loss(model(x).float(), y), dtype, adamw)


@healthy
def accuracy_is_counted_inside_the_step(dtype):
    torch.manual_seed(0)
    model, x, y = Between(nn.ReLU(), outputs=10), noise(64, 16), whole(10, 64)

    def loss():
        logits = model(x)
        (logits.argmax(-1) == y).float().mean().item()
        return F.cross_entropy(logits, y, label_smoothing=0.1)

    return training(model, loss, dtype, adamw)


@healthy
def scale_still_too_high(dtype):
    """The first steps of a GradScaler overflow in backward until it has found its level."""
    program = convnet(dtype)
    if program.scaler is not None:
        program.scaler._init_scale = 2.0**24
        program.scaler._scale = None
    return program
