"""Changes of a program that change no answer: other names, other seeds, real sizes, the other format, another memory layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, cycle

import torch
from torch import nn

from corpus import USUAL_SEEDS, Program, Training
from corpus.asking import SHORT, built
from corpus.draws import drawing

MISLEADING = ("router", "norm", "position", "teacher", "attention", "head", "time_mixer", "embedding", "loss", "master")
SHORT_RUN = 8  # steps


@dataclass(frozen=True)
class Variant:
    transform: str  # renamed, misnamed, seed, size, format or layout
    dtype: torch.dtype
    seed: int = 0
    size: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        how = {"seed": str(self.seed), "format": SHORT[self.dtype], "size": " ".join(f"{k}={v}" for k, v in self.size.items())}
        return f"{self.transform} {how.get(self.transform, '')}".strip()


def variants_of(program: Program, tool: str = "") -> list[Variant]:
    """Of a repaired twin only one, and few of a whole training under the diagnosis: those of its steps are examined as well."""
    written = program.dtypes[0]
    seeds = [Variant("seed", written, seed=seed) for seed in program.seeds]
    others = [
        *(Variant("format", dtype) for dtype in program.dtypes[1:]),
        *(Variant("size", written, size=size) for size in program.sizes),
    ]
    if program.role == "repaired":
        return seeds[:1]
    names = [] if program.fixed_names else [Variant("misnamed", written), Variant("renamed", written)]
    if tool == "diagnose" and program.steps > SHORT_RUN and program.seeds == USUAL_SEEDS:
        return [*names[:1], *seeds[:1], *others]
    return [*names, Variant("layout", written), *seeds, *others]


@contextmanager
def varied(program: Program, variant: Variant) -> Iterator[tuple[Training, Callable[[str], str]]]:
    """The training, to be run inside, and what a name of the original is called in it."""
    with drawing(variant.seed, transposed=variant.transform == "layout"):
        training = built(program, variant.dtype, **variant.size)
        if variant.transform == "renamed":
            yield training, rename_children(training.model, (f"part{i}" for i in count()))
        elif variant.transform == "misnamed":
            yield training, rename_children(training.model, (f"{word}{i}" for i, word in enumerate(cycle(MISLEADING))))
        else:
            yield training, str


def rename_children(model: nn.Module, words: Iterator[str]) -> Callable[[str], str]:
    """Registers every child under another name; under the old one it stays an attribute, so that the code works as before.

    Lists and dictionaries of modules are left alone: the names of their children are looked up by the code.
    """
    modules = dict(model.named_modules())
    for module in modules.values():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or nn.utils.parametrize.is_parametrized(module):
            continue
        children = dict(module._modules)
        module._modules.clear()
        for old, child in children.items():
            module.__dict__[old] = child
            module._modules[next(words)] = child
    names = {module: name for name, module in model.named_modules()}
    now = {old: names[module] for old, module in modules.items()}

    def renamed(name: str) -> str:
        """The longest prefix that is a module, renamed; an operation, a part of the loop or of the data keeps its name."""
        head, rest = name, ""
        while head not in now:
            head, _, last = head.rpartition(".")
            rest = f".{last}{rest}"
        return (now[head] + rest).lstrip(".") if head else name

    return renamed
