"""Precision loss that changes a decision: routes, codes, labels, ids, probabilities that are exactly 0 or 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from corpus import Training, planted
from corpus.draws import generator
from corpus.loops import Run, ends_above, low, supervised


class Experts(nn.Module):
    """Top-1 mixture of experts; the router knows the groups of tokens."""

    def __init__(self, groups: Tensor, drift: float, fp32_router: bool) -> None:
        super().__init__()
        self.router = nn.Linear(groups.shape[1], len(groups))
        self.experts = nn.ModuleList(nn.Linear(groups.shape[1], 1) for _ in groups)
        self.fp32_router = fp32_router
        self.router.weight.data.copy_(groups)
        nn.init.constant_(self.router.bias, drift)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu") and not self.fp32_router):
            logits = self.router(x)
        gate, chosen = logits.float().softmax(-1).max(-1)
        every = torch.cat([expert(x) for expert in self.experts], -1)
        return gate * every.gather(-1, chosen[:, None]).squeeze(-1)


class SparseNet(nn.Module):
    def __init__(self, groups: Tensor, drift: float, fp32_router: bool) -> None:
        super().__init__()
        self.moe = Experts(groups, drift, fp32_router)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x) + self.bias


def mixture(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """Router logits have drifted to 3000 (softmax does not see it): in bf16 they are multiples of 16, and ties go to expert 0."""
    groups = F.normalize(torch.randn(4, 8, generator=generator(21)), dim=-1) * 4
    relation = torch.randn(4, 8, generator=generator(22))
    model = SparseNet(groups, 3000.0, fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.2)

    def batch(i: int) -> list[Tensor]:
        draw = generator(23, i)
        group = torch.randint(4, (64,), generator=draw)
        x = groups[group] + torch.randn(64, 8, generator=draw)
        return [x, (x * relation[group]).sum(-1)]

    return supervised(model, optimizer, batch, F.mse_loss, dtype)


class Quantizer(nn.Module):
    """Nearest code by the expanded square; codes and features share a large common part."""

    def __init__(self, codes: Tensor, fp32: bool) -> None:
        super().__init__()
        self.codes = nn.Parameter(codes)
        self.fp32 = fp32

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu") and not self.fp32):
            near = (z.float() if self.fp32 else z) @ self.codes.t()
        score = near - 0.5 * self.codes.square().sum(-1).to(near.dtype)
        code = self.codes[score.argmax(-1)]
        return z + (code - z).detach(), F.mse_loss(code, z.detach()) + F.mse_loss(z, code.detach())


class CodedImages(nn.Module):
    """A small VQ autoencoder."""

    def __init__(self, codes: Tensor, fp32: bool) -> None:
        super().__init__()
        self.encode = nn.Linear(8, codes.shape[1])
        self.quantize = Quantizer(codes, fp32)
        self.decode = nn.Linear(codes.shape[1], 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z, code_loss = self.quantize(self.encode(x).float() + 12)
        return self.decode(z - 12), code_loss


def codebook(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """Codes lie around 12: scores near 600 are rounded to multiples of 4 in bf16, so many codes tie and the first one wins."""
    model = CodedImages(12 + 0.4 * torch.randn(16, 8, generator=generator(24)), fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    prototypes = torch.randn(6, 8, generator=generator(25))

    def batch(i: int) -> list[Tensor]:
        draw = generator(26, i)
        x = prototypes[torch.randint(6, (32,), generator=draw)] + 0.05 * torch.randn(32, 8, generator=draw)
        return [x, x]

    def criterion(out: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
        picture, code_loss = out
        return F.mse_loss(picture, x) + code_loss

    return supervised(model, optimizer, batch, criterion, dtype)


def teacher_of(seed: int) -> nn.Linear:
    """A trained classifier whose logits share an offset of 1500, as happens without a z-loss."""
    teacher = nn.Linear(10, 5).requires_grad_(False)
    teacher.weight.copy_(torch.randn(5, 10, generator=generator(seed)))
    teacher.bias.fill_(1500.0)
    return teacher


def pseudo_labels(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """A teacher labels unlabelled rows under the student's autocast: its logits near 1500 are multiples of 8 in bf16."""
    student = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5))
    teacher = teacher_of(27)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.02)

    def step(i: int) -> Tensor:
        x = torch.randn(32, 10, generator=generator(28, i))
        optimizer.zero_grad()
        with low(dtype):
            with torch.no_grad(), low(torch.float32 if fixed else dtype):
                label = teacher(x).argmax(-1)
            loss = F.cross_entropy(student(x), label)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(student, optimizer, step)


def disagrees_with_teacher(run: Run) -> bool:
    """The student differs from what the teacher really thinks on a third of new rows."""
    x = torch.randn(512, 10, generator=generator(37))
    return bool((run.training.model(x).argmax(-1) != teacher_of(27)(x).argmax(-1)).float().mean() > 0.33)


class Critic(nn.Module):
    """Action values of a state."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.value = nn.Linear(32, 3)
        nn.init.constant_(self.value.bias, offset)

    def forward(self, state: Tensor) -> Tensor:
        return self.value(self.trunk(state))


class Learner(nn.Module):
    """An online critic of the advantage, and a frozen copy of the old critic, whose values are near 2000."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = Critic(0.0), Critic(2000.0)
        self.target.requires_grad_(False)

    def wanted(self, state: Tensor) -> Tensor:
        return 0.1 * state[:, 0] + 0.99 * (self.target(state).amax(-1).float() - 2000)


def bootstrapped(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """Q-learning whose target network runs under autocast: values near 2000 are rounded to multiples of 8."""
    model = Learner()
    optimizer = torch.optim.Adam(model.online.parameters(), lr=0.02)

    def step(i: int) -> Tensor:
        state = torch.randn(32, 4, generator=generator(30, i))
        optimizer.zero_grad()
        with low(dtype):
            with torch.no_grad(), low(torch.float32 if fixed else dtype):
                wanted = model.wanted(state)
            loss = F.mse_loss(model.online(state)[:, 0], wanted)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


def values_are_wrong(run: Run) -> bool:
    """The online critic explains less than half of the true targets' variance."""
    model, state = run.training.model, torch.randn(512, 4, generator=generator(38))
    assert isinstance(model, Learner)
    with torch.no_grad():
        wanted = model.wanted(state)
        return bool((model.online(state)[:, 0] - wanted).var() > 0.5 * wanted.var())


class Ratings(nn.Module):
    """Rows of a float table whose first column is a user id."""

    def __init__(self, users: int) -> None:
        super().__init__()
        self.user = nn.Embedding(users, 4)
        self.out = nn.Linear(6, 1)

    def forward(self, rows: Tensor, ids: Tensor | None = None) -> Tensor:
        ids = rows[:, 0].long() if ids is None else ids
        return self.out(torch.cat([self.user(ids), rows[:, 1:]], -1)).squeeze(-1)


def user_ids(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """The loader casts the whole table to bf16: of 3000 user ids 640 are left, and five users share a row of the embedding."""
    model = Ratings(3008)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    mood = torch.randn(3000, generator=generator(31))

    def batch(i: int) -> list[Tensor]:
        draw = generator(32, i)
        ids = torch.arange(2000, 3000)
        rows = torch.cat([ids[:, None].float(), torch.randn(1000, 2, generator=draw)], 1)
        target = mood[ids] + 0.1 * rows[:, 1]
        return [rows.to(dtype), ids, target] if fixed else [rows.to(dtype), target]

    return supervised(model, optimizer, batch, F.mse_loss, dtype)


def portraits() -> Tensor:
    return F.normalize(torch.randn(512, 16, generator=generator(33)), dim=-1) * 4


def many_classes(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """Faces of 512 people; the labels travel in the same bf16 batch as the pictures, and odd ones above 256 become even."""
    pictures = portraits()
    model = nn.Sequential(nn.Linear(16, 513))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def batch(i: int) -> list[Tensor]:
        label = torch.randint(256, 512, (128,), generator=generator(39, i))
        sent = label if fixed else label.to(dtype)
        return [pictures[label].to(dtype), sent.long()]

    return supervised(model, optimizer, batch, F.cross_entropy, dtype)


def faces_mistaken(run: Run) -> bool:
    """More than a third of the people above 256 are not recognised."""
    found = run.training.model(portraits()[256:]).argmax(-1)
    return bool((found != torch.arange(256, 512)).float().mean() > 0.33)


class SpamFilter(nn.Module):
    """An MLP that ends in a probability."""

    def __init__(self, logits: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
        self.probability: nn.Module = nn.Identity() if logits else nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.probability(self.body(x)).squeeze(-1)


def confident_filter(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """A filter that starts sure that everything is spam: in bf16 its probability is exactly 1 and teaches nothing."""
    model = SpamFilter(fixed)
    nn.init.constant_(model.body[2].bias, 9.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    relation = torch.randn(6, generator=generator(34)) * 2

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 6, generator=generator(35, i))
        return [x, (x @ relation > 0).float()]

    def criterion(out: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(out, y) if fixed else F.binary_cross_entropy(out.float(), y)

    return supervised(model, optimizer, batch, criterion, dtype)


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, padding=1)
        self.mid = nn.Conv2d(8, 8, 3, padding=1)
        self.mask = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mask(self.mid(self.down(x).relu()).relu())


def segmentation(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """fp16 masks from sigmoid + BCE: as soon as one wrong pixel is exactly 1, 0 * inf makes every gradient NaN, for good."""
    model = Segmenter()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scaler = GradScaler("cpu", enabled=dtype == torch.float16)

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(4, 1, 8, 8, generator=generator(36, i)) * 6
        y = (x > 0).float()
        y[0].view(-1)[x[0].argmax()] = 0  # an annotator's slip in every batch
        return [x, y]

    def criterion(out: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(out, y) if fixed else F.binary_cross_entropy(torch.sigmoid(out), y)

    return supervised(model, optimizer, batch, criterion, dtype, scaler)


PROGRAMS = [
    *planted(mixture, "router_low_precision", "moe.router", "moe", hazards="absorption", shows=ends_above(5.5), steps=30),
    *planted(codebook, "router_low_precision", "quantize", hazards="absorption decision", shows=ends_above(1.2), steps=40),
    *planted(
        pseudo_labels,
        "target_in_low_precision",
        *("op:argmax", "op:linear", "op:addmm", "data:target"),
        hazards="absorption",
        shows=disagrees_with_teacher,
        steps=40,
    ),
    *planted(
        bootstrapped,
        "target_in_low_precision",
        *("target.value", "target", "data:target"),
        hazards="absorption",
        shows=values_are_wrong,
        steps=40,
    ),
    *planted(
        user_ids,
        "integer_in_low_precision",
        *("data:input", "data", "user", "op:_to_copy", "op:to"),
        hazards="integers",
        shows=ends_above(0.3),
        steps=30,
    ),
    *planted(
        many_classes,
        "integer_in_low_precision",
        *("data:target", "data", "op:_to_copy", "op:to"),
        hazards="integers",
        shows=faces_mistaken,
        steps=40,
    ),
    *planted(
        confident_filter,
        "saturated_probability_loss",
        *("probability", "op:sigmoid", "op:binary_cross_entropy", "op:binary_cross_entropy_backward"),
        hazards="saturated_probability",
        shows=ends_above(1),
        steps=40,
    ),
    *planted(
        segmentation,
        "saturated_probability_loss",
        *("op:sigmoid", "op:sigmoid_backward", "op:binary_cross_entropy", "op:binary_cross_entropy_backward"),
        findings="SCALE_COLLAPSE SCALE_DECLINE",
        hazards="saturated_probability",
        examined=5,
        shows=lambda run: sum(run.skipped) > 20,
        steps=40,
    ),
]
