"""Matrix products: checked without being computed again where possible, and never by the kernel that is being checked.

Freivalds' check: if C = A B, then C r = A (B r) for any vector r. Three products with a vector, in FP64, cost a few percent of
a matrix product; with random r an error in any element of C shows in its row. Only a product that fails it is computed in full.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core.limits import Limits
from ..watch.tensors import outside_program
from .gap import Tolerance
from .reference import Call, unit_roundoff

aten = torch.ops.aten
_PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}  # tensors before A
_WORTH_IT = 1 << 18  # multiplications; below, computing again is as cheap
_MARGIN = 4.0  # the largest of many rows


def _parts(call: Call) -> tuple[Tensor | None, Tensor, Tensor, float, float] | None:
    """C = beta * added + alpha * A B."""
    before = _PRODUCTS.get(call.func)
    if before is None:
        return None
    args, kwargs = call.inputs
    left, right = args[before], args[before + 1]
    if not before:
        return None, left, right, 0.0, 1.0
    return args[0], left, right, kwargs.get("beta", 1), kwargs.get("alpha", 1)


def passes_screen(call: Call, out: Any, tolerance: Tolerance, limits: Limits) -> bool:
    """True: the product is right, as far as its type goes. False: unknown, compute it."""
    parts = _parts(call)
    if parts is None or not isinstance(out, Tensor) or out.dtype != torch.float32 or out.device.type != "cpu":
        return False
    added, left, right, beta, alpha = parts
    if left.numel() * right.shape[-1] < _WORTH_IT:
        return False
    with outside_program():
        columns = right.shape[-1]
        probe = _probe(columns)
        inner = _times(right, probe)
        expected = _times(left, inner) * alpha
        if added is not None and beta != 0:
            expected += _times(added.expand_as(out), probe) * beta if added.dim() > 1 else beta * (added.double() @ probe)
        made = out.detach().double()
        off = float((_rows(made, probe) - expected).abs().max())
        if tolerance.given:
            return off <= (tolerance.atol or 0.0) / 4
        rms = float(torch.linalg.vector_norm(made)) / math.sqrt(out.numel())
    allowed = unit_roundoff(out.dtype) * limits.op_l2_roundoffs * limits.op_fp32_slack * _MARGIN * math.sqrt(columns) * rms
    return off <= allowed


def independent_product(call: Call) -> Tensor | None:
    """The product in FP64 by another kernel than the call's own: `bmm` for `mm`, `mm` for `bmm`. None for other operations."""
    parts = _parts(call)
    if parts is None:
        return None
    added, beta, alpha = parts[0], parts[3], parts[4]
    with outside_program():
        left, right = _wide(parts[1]), _wide(parts[2])
        if left.dim() == 2:
            product: Tensor = aten.bmm.default(left[None], right[None])[0]
        else:
            product = torch.stack([aten.mm.default(a, b) for a, b in zip(left, right)])
        return product * alpha + _wide(added) * beta if added is not None and beta != 0 else product * alpha


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return _rows(matrix.detach().double(), vector)


def _rows(matrix: Tensor, vector: Tensor) -> Tensor:
    """Matrix times vector; for a batch, each with its own vector or all with one."""
    if matrix.dim() == 2:
        return torch.mv(matrix, vector)
    return (matrix * vector.reshape(-1, 1, matrix.shape[-1])).sum(-1)


@lru_cache(maxsize=64)
def _probe(length: int) -> Tensor:
    """Signs at random, sizes between a half and one: errors of several elements do not cancel, none is hidden."""
    random = torch.rand(2, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    return (random[0] / 2 + 0.5) * torch.where(random[1] < 0.5, -1.0, 1.0)
