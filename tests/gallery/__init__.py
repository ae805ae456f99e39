"""Trainings of models from public libraries, tiny ones: each with a planted fault, and its healthy twin.

One file per library, whose `CASES` is a table: a `Job` is a training as a user writes it, a fault is a function that changes the
job. With float32 as its format a job is the same training without low precision, which proves the harm without our tool.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import AdamW, Optimizer

import nanny

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LIBRARIES = ("of_transformers", "of_timm", "of_torchvision", "of_diffusers", "of_lightning", "of_accelerate")
Batch = dict[str, Tensor]
DATA = ("data", "data:input", "data:target")


def _without_operators_of_torchvision() -> torch.library.Library | None:
    """Its wheel for accelerators cannot load them beside a torch for CPUs, and then fails at the first two that it describes."""
    found = importlib.util.find_spec("torchvision")
    for folder in (found and found.submodule_search_locations) or ():
        try:
            for compiled in Path(folder).glob("_C*"):
                torch.ops.load_library(compiled)
        except OSError:
            described = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                described.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            return described
    return None


_KEPT = _without_operators_of_torchvision()  # as long as the tests run; several libraries import torchvision


@dataclass
class Job:
    model: nn.Module
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    dtype: torch.dtype = FP16
    pure: bool = False  # the weights themselves are in `dtype`; otherwise autocast, and with fp16 a GradScaler
    lr: float = 1e-3
    optimizer: Callable[..., Optimizer] = AdamW
    scale: float = 1024.0  # where the GradScaler begins
    clip: float | None = None
    micro: int = 1  # batches added up before the optimizer steps
    steps: int = 30
    step: Callable[[Run, int], Tensor] | None = None  # the loop's body, where a fault lies in it
    after: list[Callable[[Run], Any]] = field(default_factory=list)  # at the end of each step
    judged_by: Callable[[Run], float] | None = None  # what is worse than in FP32, if it is not the loss


@dataclass
class Run:
    """A job that has begun."""

    job: Job
    model: nn.Module
    optimizer: Optimizer
    scaler: GradScaler
    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def forward(self, i: int) -> Tensor:
        job = self.job
        batch = {
            name: value.to(job.dtype) if job.pure and value.is_floating_point() else value for name, value in job.batch(i).items()
        }
        with torch.autocast("cpu", job.dtype) if not job.pure and job.dtype != FP32 else contextlib.nullcontext():
            return job.loss(self.model, batch)

    def step(self, i: int) -> Tensor:
        job = self.job
        loss = job.step(self, i) if job.step else self.usual_step(i)
        for then in job.after:
            then(self)
        self.losses.append(float(loss.detach()))
        return loss

    def usual_step(self, i: int) -> Tensor:
        self.optimizer.zero_grad()
        for k in range(self.job.micro):
            loss = self.forward(i * self.job.micro + k) / self.job.micro
            self.scaler.scale(loss).backward()
        if self.job.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip)
        self.update()
        return loss * self.job.micro

    def update(self) -> None:
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < before


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], Job]
    plant: Callable[[Job], None]
    causes: tuple[str, ...]  # any of which a fair judge would accept
    culprits: tuple[str, ...]  # the same; a name stands for the modules inside it too
    precision: bool = True
    loop: Callable[..., Any] | None = None  # who holds the loop, if it is not the user

    def __str__(self) -> str:
        return self.name


def begun(case: Case, *, faulty: bool, dtype: torch.dtype | None = None) -> Run:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    job = case.build()
    if dtype is not None:
        job.dtype = dtype
    if faulty:
        case.plant(job)
    if job.pure:
        job.model.to(job.dtype)
    job.model.train()
    optimizer = job.optimizer([p for p in job.model.parameters() if p.requires_grad], lr=job.lr)
    scaler = GradScaler("cpu", init_scale=job.scale, enabled=job.dtype == FP16 and not job.pure)
    return Run(job, job.model, optimizer, scaler)


def finished(case: Case, *, faulty: bool, dtype: torch.dtype | None = None) -> Run:
    """Without our tool."""
    run = begun(case, faulty=faulty, dtype=dtype)
    if case.loop:
        case.loop(run)
    else:
        for i in range(run.job.steps):
            run.step(i)
    return run


def watched(case: Case, *, faulty: bool) -> nanny.MixedPrecisionNanny:
    """With it: the callback or `watch` of the library that holds the loop, with defaults."""
    run = begun(case, faulty=faulty)
    if case.loop:
        seen = case.loop(run, examine="auto")
        assert isinstance(seen, nanny.MixedPrecisionNanny)
        return seen
    with nanny.MixedPrecisionNanny(run.model, run.optimizer, run.scaler, output_dir=None, live=False) as watcher:
        for i in range(run.job.steps):
            with watcher.step(i):
                run.step(i)
    return watcher


def is_worse(run: Run, reference: Run) -> bool:
    """It breaks, mostly skips its steps, or ends clearly above the reference."""
    if run.job.judged_by:
        mine, wanted = run.job.judged_by(run), reference.job.judged_by(reference)
        return not math.isfinite(mine) or mine > 1.2 * wanted + 1e-3
    late = run.losses[-len(run.losses) // 3 :]
    if any(not math.isfinite(loss) for loss in late) or run.skipped > len(run.losses) / 3:
        return True
    theirs = reference.losses[-len(reference.losses) // 3 :]
    mine, wanted, start = sum(late) / len(late), sum(theirs) / len(theirs), reference.losses[0]
    return mine > wanted + max(0.1 * abs(start - wanted), 0.02 * abs(wanted))


def learned(run: Run) -> bool:
    late = run.losses[-len(run.losses) // 3 :]
    return all(map(math.isfinite, run.losses)) and sum(late) / len(late) < run.losses[0]


def tables() -> Iterator[tuple[str, str, tuple[Case, ...]]]:
    """Each library's cases, and why they cannot be run here."""
    for name in LIBRARIES:
        try:
            yield name, "", importlib.import_module(f"gallery.{name}").CASES
        except (ImportError, RuntimeError) as error:  # a missing package, or one that was built for another torch
            yield name, f"{name.removeprefix('of_')} cannot be imported: {str(error).splitlines()[0]}", ()


# ---- tasks that can be learned, from a generator of their own


def tokens(vocabulary: int = 32, length: int = 12, rows: int = 8) -> Callable[[int], Batch]:
    """Each token follows from the one before."""

    def batch(i: int) -> Batch:
        draw = torch.Generator().manual_seed(1000 + i)
        ids = [torch.randint(2, vocabulary, (rows,), generator=draw)]
        for _ in range(length - 1):
            ids.append((ids[-1] * 3 + 1) % (vocabulary - 2) + 2)
        return {"input_ids": torch.stack(ids, 1)}

    return batch


def pictures(size: int = 16, rows: int = 8, channels: int = 3, batches: int = 1000) -> Callable[[int], Batch]:
    """The class is the quarter that is brighter."""

    def batch(i: int) -> Batch:
        draw = torch.Generator().manual_seed(2000 + i % batches)
        labels = torch.randint(0, 4, (rows,), generator=draw)
        images, half = torch.randn(rows, channels, size, size, generator=draw) * 0.3, size // 2
        for row, label in enumerate(labels.tolist()):
            y, x = divmod(label, 2)
            images[row, :, y * half : (y + 1) * half, x * half : (x + 1) * half] += 1.0
        return {"images": images, "labels": labels}

    return batch


def sentences(vocabulary: int = 32, length: int = 10, classes: int = 4, rows: int = 8) -> Callable[[int], Batch]:
    """The class is told by the first token."""

    def batch(i: int) -> Batch:
        draw = torch.Generator().manual_seed(3000 + i)
        ids = torch.randint(4, vocabulary, (rows, length), generator=draw)
        return {"input_ids": ids, "labels": ids[:, 0] % classes}

    return batch


def classified(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["images"]).float(), batch["labels"])


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch, labels=batch["input_ids"]).loss


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def gained(module: nn.Module, by: float) -> None:
    """Its weights grow: what happens to outliers in long trainings, at once."""
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(by)


def exact_average(decay: float) -> Callable[[Run], None]:
    """Keeps the average of the weights beside the run, in float64."""

    def update(run: Run) -> None:
        now = [p.detach().double() for p in run.model.parameters()]
        before = run.extra.setdefault("exact", now)
        run.extra["exact"] = [a * decay + b * (1 - decay) for a, b in zip(before, now)]

    return update


def off_average(run: Run, average: Any) -> float:
    """How far an average is from what it should be, against how far the weights are."""
    exact = run.extra["exact"]
    off = sum(float((a.detach().double() - b).square().sum()) for a, b in zip(average, exact))
    moved = sum(float((p.detach().double() - b).square().sum()) for p, b in zip(run.model.parameters(), exact))
    return float((off / moved) ** 0.5)


def with_nan_in_batch(at: int, name: str) -> Callable[[Job], None]:
    def plant(job: Job) -> None:
        sound = job.batch

        def batch(i: int) -> Batch:
            values = sound(i)
            if i >= at:
                values[name][0].view(-1)[3] = float("nan")
            return values

        job.batch = batch

    return plant


def with_rate(lr: float, optimizer: Callable[..., Optimizer] | None = None) -> Callable[[Job], None]:
    def plant(job: Job) -> None:
        job.lr, job.optimizer = lr, optimizer or job.optimizer

    return plant
