"""Tensors that are something else: logged, scaled bytes, without length or truth."""

from __future__ import annotations

import collections
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from ..program import Program, mlp, program, sick, training


class _Logged(torch.Tensor):
    log: ClassVar[collections.Counter[str]] = collections.Counter()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Logged.log[getattr(func, "__name__", str(func))] += 1
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out.as_subclass(torch.Tensor) if func is torch.Tensor.mean and isinstance(out, cls) else out


@program("logged_subclass_of_activations_gradients_and_weights", "subclasses")
def logged(seed: int) -> Program:
    _Logged.log = collections.Counter()
    model = mlp()
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(_Logged))

    def loss(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 0):
            return model(sick(i).as_subclass(_Logged)).float().square().mean()

    return training(model, loss, torch.optim.AdamW(model.parameters(), foreach=True), steps=5, extra=lambda: _Logged.log)


class _Scaled(torch.Tensor):
    """An int8 payload with a scale that pretends to be a float."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32, requires_grad=False)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.payload, self.scale = data, scale

    def __repr__(self, **more: Any) -> str:
        raise RuntimeError("nobody prints me")

    def __tensor_flatten__(self) -> Any:
        return ["payload", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return _Scaled(inner["payload"], inner["scale"])

    def plain_tensors(self) -> Any:
        return self.payload, self.scale

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        return self.payload.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return _Scaled(args[0].payload, args[0].scale)
        if func is torch.ops.aten.copy_.default:
            scale = args[1].abs().amax() / 127
            args[0].payload.copy_((args[1] / scale).round())
            args[0].scale.copy_(scale)
            return args[0]
        if func not in (
            torch.ops.aten.mm.default,
            torch.ops.aten.addmm.default,
            torch.ops.aten.t.default,
            torch.ops.aten.clone.default,
        ):
            raise NotImplementedError(f"{func} on a scaled tensor")
        return func(*(a.dequantize() if isinstance(a, _Scaled) else a for a in args), **(kwargs or {}))


@program("frozen_weights_in_wrapped_bytes_below_adapters", "subclasses")
def adapters(seed: int) -> Program:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            dense = torch.randn(8, 8)
            scale = dense.abs().amax() / 127
            self.base = nn.Parameter(_Scaled((dense / scale).round().to(torch.int8), scale), requires_grad=False)
            self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.base) + self.up(self.down(x))

    model = nn.Sequential(Adapted(), nn.ReLU(), Adapted())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return training(model, lambda i: model(sick(i)).square().mean(), optimizer, steps=5)


@program("a_view_of_a_subclass_forgets_who_it_was", "subclasses")
def forgets(seed: int) -> Program:
    class Tagged(torch.Tensor):
        @property
        def shape(self) -> Any:  # type: ignore[override]
            return ("batch", *super().shape[1:])

        def size(self, *args: Any) -> Any:  # type: ignore[override]
            return super().size(*args)

        def __len__(self) -> int:
            raise TypeError("how long is a batch")

        def __bool__(self) -> bool:
            raise TypeError("neither true nor false")

        def __iter__(self) -> Any:
            raise TypeError("not one by one")

    model = mlp()

    def loss(i: int) -> torch.Tensor:
        out = model(sick(i).as_subclass(Tagged))
        return out.as_subclass(torch.Tensor).square().mean()

    return training(model, loss, steps=4)
