"""Factors of a matrix are free in signs, phases, order and bases of equal values: no reference has the same ones.

What they must satisfy is not free. It is checked in the wide type, relative to the matrix, as LAPACK's own tests do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..watch.op_facts import KERNEL_ERRORS, bare_name
from .reference import Call, wide_copy


class Equation(NamedTuple):
    said: str
    left: Tensor
    right: Tensor
    size: Tensor | float = 1.0  # what a roundoff is relative to: 1, or the norm of each matrix


_Made = Callable[[Tensor, list[Tensor], dict[str, Any]], list[Equation]]


class _Decomposition(NamedTuple):
    free: tuple[int, ...]  # which results are not unique
    equations: _Made


def free_results(call: Call) -> tuple[int, ...]:
    """Places of the results that no reference can have the same of."""
    decomposition = _DECOMPOSITIONS.get(bare_name(call.func))
    return () if decomposition is None else decomposition.free


def equations_of(call: Call, results: list[Tensor]) -> list[Equation] | None:
    """What the results of a decomposition must satisfy, in the wide type; None: there is nothing that tells."""
    matrix, given = _arguments(call)
    wide = [wide_copy(t) if t.is_floating_point() or t.is_complex() else t.cpu() for t in results]
    matrix = wide_copy(matrix)
    if not bool(torch.isfinite(matrix).all()):
        return None
    try:
        return _DECOMPOSITIONS[bare_name(call.func)].equations(matrix, wide, given) or None
    except KERNEL_ERRORS:
        return None


def _arguments(call: Call) -> tuple[Tensor, dict[str, Any]]:
    args, kwargs = call.inputs
    names = [a.name for a in call.func._schema.arguments]
    given = {a.name: a.default_value for a in call.func._schema.arguments} | dict(zip(names, args)) | kwargs
    return given[names[0]], given


def _eig(a: Tensor, made: list[Tensor], given: dict[str, Any]) -> list[Equation]:
    values, vectors = made
    lengths = torch.linalg.vector_norm(vectors, dim=-2, keepdim=True)
    return [
        Equation("A V = V diag(L)", a.to(vectors.dtype) @ vectors, vectors * values.unsqueeze(-2), _norm(a)),
        Equation("columns of V have length 1", lengths, torch.ones_like(lengths)),
        _trace(a, values),
    ]


def _eigvals(a: Tensor, made: list[Tensor], given: dict[str, Any]) -> list[Equation]:
    (values,) = made
    shifted = a.to(values.dtype).unsqueeze(-3) - torch.diag_embed(values.unsqueeze(-1).expand(*values.shape, a.shape[-1]))
    left = torch.linalg.svdvals(shifted)[..., -1:]  # 0: A - L is singular
    return [Equation("A - L is singular", left, torch.zeros_like(left), _norm(a)), _trace(a, values)]


def _trace(a: Tensor, values: Tensor) -> Equation:
    left, right = values.sum(-1), a.diagonal(dim1=-2, dim2=-1).sum(-1).to(values.dtype)
    return Equation("sum of L = trace of A", left[..., None, None], right[..., None, None], _norm(a))


def _norm(a: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(a, keepdim=True)


def _eigh(a: Tensor, made: list[Tensor], given: dict[str, Any]) -> list[Equation]:
    values, vectors = made
    half = a.tril(-1) if given["UPLO"].upper() == "L" else a.triu(1).mH
    whole = half + half.mH + torch.diag_embed(a.diagonal(dim1=-2, dim2=-1).real.to(a.dtype))
    made_again = vectors * values.unsqueeze(-2) @ vectors.mH
    return [Equation("V diag(L) V' = A", made_again, whole, _norm(a)), _unitary("V' V = 1", vectors.mH @ vectors)]


def _svd(a: Tensor, made: list[Tensor], given: dict[str, Any]) -> list[Equation]:
    u, s, vh = made
    k = s.shape[-1]
    return [
        Equation("U diag(S) V' = A", u[..., :k] * s.unsqueeze(-2) @ vh[..., :k, :], a, _norm(a)),
        _unitary("U' U = 1", u.mH @ u),
        _unitary("V' V = 1", vh @ vh.mH),
    ]


def _qr(a: Tensor, made: list[Tensor], given: dict[str, Any]) -> list[Equation]:
    q, r = made
    triangle = Equation("R is triangular", r, r.triu(), _norm(a))
    if given["mode"] == "r":
        return [Equation("R' R = A' A", r.mH @ r, a.mH @ a, _norm(a).square()), triangle]
    return [Equation("Q R = A", q @ r, a, _norm(a)), _unitary("Q' Q = 1", q.mH @ q), triangle]


def _geqrf(a: Tensor, made: list[Tensor], given: dict[str, Any]) -> list[Equation]:
    packed, tau = made
    k = tau.shape[-1]
    q = torch.linalg.householder_product(packed[..., :k], tau)
    return [Equation("Q R = A", q @ packed[..., :k, :].triu(), a, _norm(a)), _unitary("Q' Q = 1", q.mH @ q)]


def _unitary(said: str, product: Tensor) -> Equation:
    return Equation(said, product, torch.eye(product.shape[-1], dtype=product.dtype).expand_as(product))


def _plu(a: Tensor, lu: Tensor, pivots: Tensor) -> list[Equation]:
    """torch factors the transpose where that lies better in memory."""
    p, lower, upper = torch.lu_unpack(lu, pivots)
    product = p @ lower @ upper
    candidates = [m for m in (a, a.mT) if m.shape == product.shape]
    nearest = min(candidates, key=lambda m: float(torch.linalg.vector_norm(product - m)))
    return [Equation("P L U = A", product, nearest, _norm(a))]


_DECOMPOSITIONS = {
    "linalg_eig": _Decomposition((0, 1), _eig),
    "linalg_eigvals": _Decomposition((0,), _eigvals),
    "_linalg_eigvals": _Decomposition((0,), _eigvals),
    "_linalg_eigh": _Decomposition((1,), _eigh),
    "_linalg_svd": _Decomposition((0, 2), _svd),
    "linalg_qr": _Decomposition((0, 1), _qr),
    "geqrf": _Decomposition((0, 1), _geqrf),
    "linalg_lu": _Decomposition(
        (0, 1, 2), lambda a, made, given: [Equation("P L U = A", made[0] @ made[1] @ made[2], a, _norm(a))]
    ),
    "linalg_lu_factor_ex": _Decomposition((0,), lambda a, made, given: _plu(a, made[0], made[1])),
    "_linalg_det": _Decomposition((1,), lambda a, made, given: _plu(a, made[1], made[2])),
    "_linalg_slogdet": _Decomposition((2,), lambda a, made, given: _plu(a, made[2], made[3])),
    "_linalg_solve_ex": _Decomposition((1,), lambda a, made, given: _plu(a, made[1], made[2])),
    "linalg_ldl_factor_ex": _Decomposition((0,), lambda a, made, given: []),  # its blocks are not unpacked anywhere
}
