"""Code without a file, without lines, from pipes and huge files."""

from __future__ import annotations

import linecache
import os
import types
from typing import Any

import torch
from torch import nn

from ..program import Program, mlp, program, training

SOURCE = """
def forward(self, x):
    y = self.inner(x)
    return (y * y).mean()
"""


def _from_source(filename: str, namespace: dict[str, Any] | None = None, source: str = SOURCE) -> nn.Module:
    """A model whose code claims to come from `filename`."""
    made: dict[str, Any] = namespace if namespace is not None else {}
    exec(compile(source, filename, "exec"), made)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        forward = made["forward"]

    return Model()


def _on(model: nn.Module, **more: Any) -> Program:
    return training(model, lambda i: model(torch.full((2, 8), float("inf") if i == 2 else 1.0)), steps=4, **more)


for _label, _path in (
    ("endless_device", "/dev/zero"),
    ("missing_file", "/nowhere/at/all.py"),
    ("directory", "/"),
    ("empty_name", ""),
    ("notebook_cell", "<ipython-input-3-abc>"),
    ("surrogates", "caf\udce9\udcff.py"),
):

    @program(f"code_from_{_label}", "code")
    def code_from(seed: int, path: str = _path) -> Program:
        return _on(_from_source(path))


@program("code_from_a_pipe_nobody_writes", "code")
def code_from_pipe(seed: int) -> Program:
    os.mkfifo("pipe.py")
    return _on(_from_source(os.path.abspath("pipe.py")), extra=lambda: os.unlink("pipe.py"))


@program("code_from_a_huge_binary_file", "code")
def code_from_binary(seed: int) -> Program:
    with open("huge.py", "wb") as out:
        out.truncate(1 << 30)  # sparse: takes no room on the disk, but all of it in memory
    return _on(_from_source(os.path.abspath("huge.py")), extra=lambda: os.unlink("huge.py"))


@program("code_with_a_loader_that_raises", "code")
def code_with_loader(seed: int) -> Program:
    asked: list[str] = []

    class Loader:
        def get_source(self, name: str) -> str:
            asked.append(name)
            raise ZeroDivisionError("no source for you")

        def __getattr__(self, name: str) -> Any:
            raise ZeroDivisionError(name)

    namespace: dict[str, Any] = {"__name__": 3.5, "__loader__": Loader(), "__spec__": object(), "__file__": None}
    return _on(_from_source("generated.py", namespace))


@program("code_without_line_numbers", "code")
def code_without_lines(seed: int) -> Program:
    model = _from_source("generated.py")
    kind: Any = type(model)
    code = kind.forward.__code__.replace(co_linetable=b"", co_firstlineno=0)
    kind.forward = types.FunctionType(code, {})
    return _on(model)


@program("line_cache_emptied_and_patched", "code")
def cache_patched(seed: int) -> Program:
    model = mlp()
    original = linecache.getline, linecache.getlines

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no lines today")

    def loss(i: int) -> torch.Tensor:
        if i == 0:
            linecache.clearcache()
            linecache.getline = linecache.getlines = refuse
        return model(torch.full((2, 8), float("nan") if i else 1.0)).sum()

    made = training(model, loss)

    def loop(watch: Any) -> None:
        try:
            for i in range(3):
                with watch.step(i):
                    made.step(i)
            watch.close()
        finally:
            linecache.getline, linecache.getlines = original

    made.loop = loop
    return made
