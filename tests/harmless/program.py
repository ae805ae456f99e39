"""A program is a small training run that must come out the same, bit for bit, whoever watches it.

    @program("relu_in_place", "in place")
    def relu_in_place(seed):
        model = ...
        return training(model, lambda i: model(x).sum())

`state()` is everything that must be the same: what the steps returned, weights, buffers, gradients, the state of the
optimizers, the random states of Python, numpy and torch, and what the program itself adds with `extra`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import pathlib
import pkgutil
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

NAN = float("nan")
TESTS = str(pathlib.Path(__file__).resolve().parents[1])
BUILDS: dict[str, Callable[[int], Program]] = {}
THEMES: dict[str, str] = {}


def program(name: str, theme: str) -> Callable[[Callable[[int], Program]], Callable[[int], Program]]:
    """Registers `build(seed) -> Program` under a name that nobody else has."""

    def register(build: Callable[[int], Program]) -> Callable[[int], Program]:
        assert name not in BUILDS, f"two programs named {name}"
        BUILDS[name] = build
        THEMES[name] = theme
        return build

    return register


def load_programs() -> dict[str, Callable[[int], Program]]:
    from . import programs

    for found in pkgutil.iter_modules(programs.__path__):
        importlib.import_module(f"{programs.__name__}.{found.name}")
    return BUILDS


class Unwatched:
    """What a program's own loop sees of the tool; here nobody watches."""

    @contextlib.contextmanager
    def step(self, i: int) -> Iterator[None]:
        yield

    def begin(self, i: int) -> None: ...

    def end(self) -> None: ...

    def another(self, model: nn.Module, optimizer: Any = None) -> Unwatched:
        return Unwatched()

    def close(self) -> None: ...


@dataclasses.dataclass
class Program:
    models: list[nn.Module]
    optimizers: list[Any]
    step: Callable[[int], Any]
    steps: int = 3
    scaler: Any = None
    extra: Callable[[], Any] | None = None
    loop: Callable[[Any], None] | None = None  # instead of `for i in range(steps): with watch.step(i): step(i)`
    seen: list[Any] = dataclasses.field(default_factory=list)

    def run(self, watch: Any) -> None:
        if self.loop is not None:
            self.loop(watch)
            return
        for i in range(self.steps):
            with watch.step(i):
                value = self.step(i)
            self.see(value)

    def see(self, value: Any) -> None:
        with torch.no_grad():
            self.seen.append(bits(value))

    def state(self) -> dict[str, Any]:
        randoms = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
        return {
            "seen": self.seen,
            "random": bits(randoms),
            "weights": [{name: bits(value) for name, value in tensors_of(model)} for model in self.models],
            "gradients": [{name: bits(p.grad) for name, p in model.named_parameters()} for model in self.models],
            "training": [[m.training for m in model.modules()] for model in self.models],
            "optimizers": [bits(optimizer.state_dict()) for optimizer in self.optimizers],
            "scaler": bits(self.scaler.state_dict()) if self.scaler is not None else None,
            "extra": bits(self.extra()) if self.extra is not None else None,
        }


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def training(
    model: nn.Module,
    loss: Callable[[int], torch.Tensor],
    optimizer: Any = None,
    **more: Any,
) -> Program:
    """The usual step around a loss."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = loss(i)
        value.backward()
        optimizer.step()
        return value

    return Program([model], [optimizer], step, **more)


def mlp(width: int = 8, out: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out))


def batch(i: int, rows: int = 4, width: int = 8) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * width).reshape(rows, width) * (i + 1)


def sick(i: int, at: int = 2) -> torch.Tensor:
    """A batch that is NaN at one step."""
    return batch(i) * (NAN if i == at else 1)


def made_of(forward: Any, *parts: nn.Module) -> nn.Module:
    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(parts or [nn.Linear(8, 8)])

        def forward(self, *args: Any) -> Any:
            return forward(self.parts, *args)

    return Made()


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def bits(value: Any, depth: int = 0) -> Any:
    """A JSON value that is the same if and only if every bit is."""
    if isinstance(value, torch.Tensor):
        return tensor_bits(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return "f" + struct.pack("<d", value).hex()
    if isinstance(value, complex):
        return [bits(value.real), bits(value.imag)]
    if isinstance(value, (bytes, bytearray)):
        return hashlib.sha1(value).hexdigest()
    if isinstance(value, np.ndarray):
        return f"ndarray {value.dtype} {value.shape} {hashlib.sha1(value.tobytes()).hexdigest()}"
    if isinstance(value, Mapping):
        return {str(key): bits(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [bits(item, depth + 1) for item in value]
        text = repr(items)
        return items if len(text) < 2000 else hashlib.sha1(text.encode()).hexdigest()
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: bits(getattr(value, f.name), depth + 1) for f in dataclasses.fields(value)}
    if hasattr(value, "__dict__") and depth < 3 and not callable(value):
        return {type(value).__name__: bits(vars(value), depth + 1)}
    return type(value).__name__


def tensor_bits(tensor: torch.Tensor) -> Any:
    about = f"{type(tensor).__name__} {str(tensor.dtype)[6:]} grad={tensor.requires_grad}"
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        return f"{about} uninitialized"
    if tensor.is_nested:
        return [about, [tensor_bits(part) for part in tensor.detach().unbind()]]
    if tensor.is_meta:
        return f"{about} meta {tuple(tensor.shape)} {tensor.stride()}"
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.detach().coalesce()
        return [about, "coo", tensor_bits(tensor.indices()), tensor_bits(tensor.values())]
    if tensor.layout == torch.sparse_csr:
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values().detach())
        return [about, "csr", *(tensor_bits(part) for part in parts)]
    if tensor.is_quantized:
        return [about, tensor_bits(tensor.int_repr()), str(tensor.qscheme())]
    if hasattr(tensor, "plain_tensors"):  # the wrapper subclasses of these programs
        return [about, *(tensor_bits(part) for part in tensor.plain_tensors())]
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        data = bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""
        where = f"{tuple(tensor.shape)} {tensor.stride()}"
    return f"{about} {where} {hashlib.sha1(data).hexdigest()[:16]}"
