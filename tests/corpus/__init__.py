"""One corpus of small programs that every tool is asked about: planted faults, their repaired twins, and healthy trainings.

A family is a file or a folder here; a module of it has `PROGRAMS`, made by `planted` and `healthy`. A program is a frozen record:
how to build it, in which formats its fault (or its health) shows, and what each tool must say. `tools` names the tools that can
be asked; a healthy or repaired program asks all of its tools for silence. `asking` puts the questions, `variants` changes the
program without changing the answer, `known_wrong` lists what is answered wrongly today, `quick` what `make test` runs.

A builder is the program of a user: `build(fixed=False, dtype=torch.float16)`; with `dtype=torch.float32` it is the same program
without low precision, which tells whether precision is to blame. One that takes sizes has further arguments (`sizes`).
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
BOTH = (BF16, FP16)
USUAL_SEEDS = (1, 2)
WIDE: tuple[Mapping[str, int], ...] = ({"rows": 64, "width": 128}, {"rows": 16, "width": 512})  # activations of real layers

torch.set_num_threads(1)  # tiny tensors; and some kernels' results depend on the number of threads


@dataclass(frozen=True)
class Example:
    """One batch apart from the loop, as `auto_diff` takes it: the loss is loss(model(*inputs), target)."""

    inputs: tuple[Any, ...]
    loss: Callable[..., Tensor] | None = None
    target: Any = None


@dataclass
class Training:
    model: nn.Module
    optimizer: Any  # one, a list of them, or None
    step: Callable[[int], Any]  # one whole step: forward, backward, clipping, optimizer, scaler, averages; returns the loss
    scaler: GradScaler | None = None
    example: Example | None = None


@dataclass(frozen=True)
class Program:
    name: str
    family: str
    build: Callable[..., Training]
    role: str  # planted, repaired or healthy
    tools: frozenset[str]  # those that can be asked
    dtypes: tuple[torch.dtype, ...]  # the formats in which the answer is right; the program was written in the first
    steps: int = 20
    shows: Callable[[Any], bool] | None = field(default=None, compare=False)  # the harm, seen in a Run without the nanny
    sizes: tuple[Mapping[str, int], ...] = field(
        default=(), compare=False
    )  # further arguments of `build` under which the answer stays right
    seeds: tuple[int, ...] = USUAL_SEEDS  # of its variants
    fixed_names: bool = False  # its loop looks parts up by name, so that they cannot be renamed
    # what is to be said of a planted fault
    cause: str = ""
    culprits: tuple[str, ...] = ()  # every name that a fair judge would accept
    precision_caused: bool | None = None
    hazards: tuple[str, ...] = ()  # the kinds that an examined step may call it
    examined: int = 0  # the step that shows it
    findings: tuple[str, ...] = ()  # codes of the monitor, any of which is right
    policies: tuple[str, ...] = ("native",)  # of `auto_diff`
    survives: bool | None = None  # what-if of the same training recorded in FP32: does it survive in `dtypes[0]`?

    def __str__(self) -> str:
        return self.name

    @property
    def in_reference(self) -> bool:
        """The fault is there in FP32 too."""
        return self.precision_caused is False


def planted(
    build: Callable[..., Training],
    cause: str = "",
    *culprits: str,
    tools: str = "diagnose",
    precision_caused: bool | None = True,
    twin: str = "",
    hazards: str = "",
    findings: str = "",
    also: tuple[torch.dtype, ...] = (),
    **facts: Any,
) -> list[Program]:
    """A fault and, if its builder can repair it, the repaired twin; they are named after the builder. Lists of words are strings.

    A tool is asked if there is something that it must say: hazards, findings, a fate; `tools` names further ones. The twin is
    asked by the same tools and by the monitor, unless `twin` says otherwise.
    """
    said = {"examine": hazards, "monitor": findings, "whatif": facts.get("survives") is not None}
    fault = Program(
        build.__name__,
        family_of(build),
        build,
        "planted",
        frozenset([*tools.split(), *(tool for tool, what in said.items() if what)]),
        (written_in(build), *also),
        cause=cause,
        culprits=culprits,
        precision_caused=precision_caused,
        hazards=tuple(hazards.split()),
        findings=tuple(findings.split()),
        **facts,
    )
    if "fixed" not in inspect.signature(build).parameters:
        return [fault]
    silent = (fault.tools | {"monitor"} if "diagnose" in fault.tools else fault.tools) - {"whatif"}
    cured = Program(
        f"{fault.name}_fixed",
        fault.family,
        Repaired(build),
        "repaired",
        frozenset(twin.split()) or silent,
        fault.dtypes,
        fault.steps,
        learns if fault.shows else None,
        fault.sizes,
        examined=fault.examined,
    )
    return [fault, cured]


@dataclass(frozen=True)
class Repaired:
    """The builder with its fault repaired."""

    build: Callable[..., Training]

    def __call__(self, **how: Any) -> Training:
        return self.build(fixed=True, **how)


def healthy(
    build: Callable[..., Training],
    tools: str = "diagnose monitor examine whatif",
    dtypes: tuple[torch.dtype, ...] = (),
    also: tuple[torch.dtype, ...] = (),
    **facts: Any,
) -> list[Program]:
    """An ordinary program; its second step is examined, when the optimizer has a state, and it survives its format."""
    facts = {"examined": 1, "survives": True, **facts}
    formats = dtypes or (written_in(build), *also)
    return [Program(build.__name__, family_of(build), build, "healthy", frozenset(tools.split()), formats, **facts)]


def learns(run: Any) -> bool:
    return bool(run.learned)


def family_of(build: Callable[..., Training]) -> str:
    return build.__module__.split(".")[1]


def written_in(build: Callable[..., Training]) -> torch.dtype:
    dtype = inspect.signature(build).parameters["dtype"].default
    assert isinstance(dtype, torch.dtype)
    return dtype


@cache
def all_programs() -> tuple[Program, ...]:
    names = [m.name for m in pkgutil.walk_packages(__path__, f"{__name__}.") if not m.name.rpartition(".")[2].startswith("test_")]
    return tuple(program for name in names for program in getattr(importlib.import_module(name), "PROGRAMS", ()))


@cache
def by_name() -> dict[str, Program]:
    return {program.name: program for program in all_programs()}


def asked(tool: str, *roles: str) -> list[Program]:
    """The programs about which a tool can be asked."""
    return [p for p in all_programs() if tool in p.tools and (not roles or p.role in roles)]
