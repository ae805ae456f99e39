"""What an optimizer step really did to the weights, and how the optimizer rounds: on traced steps, by samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..measure.flatten import as_line, thin
from ..measure.transfer import PendingRead
from ..records import OptimizerState, Update
from .names import short_dtype

SAMPLE = 4096
_STATE_KEYS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_avg", "momentum_buffer")
_RANK = {"float8_e5m2": 0, "float8_e4m3fn": 1, "bfloat16": 2, "float16": 3, "float32": 4, "float64": 5}


def narrowest(dtypes: set[str]) -> str:
    return min(dtypes, key=lambda name: _RANK.get(name, 9), default="")


def lr_of(group: Mapping[str, Any]) -> float:
    lr = group.get("lr", 0.0)
    return float(lr) if not isinstance(lr, Tensor) or lr.device.type == "cpu" else float("nan")


class UpdateProbe:
    """Samples of the weights before the step, compared after it; the counts are read with the other numbers of the step."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._before: list[tuple[str, Tensor, Tensor, Tensor, float]] = []
        self._rows: list[Tensor] = []
        for group in optimizer.param_groups:
            lr = lr_of(group)
            for p in group["params"]:
                name = names.get(id(p))
                if name is None or p.grad is None or p.grad.layout != torch.strided or not p.is_floating_point() or not p.numel():
                    continue
                weight = thin(as_line(p), SAMPLE).clone()
                moved = thin(as_line(p.grad), SAMPLE) != 0
                if moved.shape == weight.shape:  # a gradient of another memory layout cannot be matched element by element
                    self._before.append((name, p, weight, moved, lr))

    def after(self) -> None:
        for _, p, weight, moved, _ in self._before:
            now = thin(as_line(p), SAMPLE)
            change = torch.linalg.vector_norm(now.float() - weight.float())
            same = ((now == weight) & moved).sum()
            self._rows.append(torch.stack([moved.sum().float(), same.float(), change, torch.linalg.vector_norm(weight.float())]))

    def pending(self) -> PendingRead:
        return PendingRead([torch.stack(self._rows) if self._rows else None])

    def updates(self, read: PendingRead) -> tuple[Update, ...]:
        rows = read.arrays()[0]
        if rows is None:
            return ()
        out = []
        for (name, p, weight, _, lr), (moved, same, change, norm) in zip(self._before, rows.tolist()):
            n = max(weight.numel(), 1) ** 0.5
            out.append(Update(name, short_dtype(p.dtype), lr, int(moved), int(same), change / n, norm / n))
        return tuple(out)


def optimizer_state(optimizer: Optimizer) -> OptimizerState:
    """Facts that decide how it rounds. Reads a median of a small sample where that is free (CPU)."""
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    params = [p for g in optimizer.param_groups for p in g["params"]]
    betas = group.get("betas")
    kept = [optimizer.state[p] for p in params if p in optimizer.state]
    states = {short_dtype(s[k].dtype) for s in kept for k in _STATE_KEYS if isinstance(s.get(k), Tensor)}
    eps = group.get("eps")
    return OptimizerState(
        name=type(optimizer).__name__,
        rounds_to_nearest=type(optimizer).__module__.startswith("torch.optim"),
        fused=bool(group.get("fused")),
        lr=lr_of(group),
        eps=float(eps) if isinstance(eps, (int, float)) else None,
        beta2=float(betas[1])
        if isinstance(betas, (tuple, list)) and len(betas) > 1 and not isinstance(betas[1], Tensor)
        else None,
        param_dtype=narrowest({short_dtype(p.dtype) for p in params if p.is_floating_point()}),
        state_dtype=narrowest(states),
        eps_ratio=_eps_ratio(kept, group),
    )


def _eps_ratio(kept: list[Any], group: Mapping[str, Any]) -> float | None:
    """Median of sqrt(v_hat)/eps over the elements that ever had a gradient: below 1, eps and not the gradient sets the step."""
    eps, betas = group.get("eps"), group.get("betas")
    if not isinstance(eps, (int, float)) or not eps or not isinstance(betas, (tuple, list)) or len(betas) < 2:
        return None
    ratios = []
    for state in kept:
        v, step = state.get("exp_avg_sq"), state.get("step")
        if not isinstance(v, Tensor) or v.device.type != "cpu" or v.layout != torch.strided or not v.numel():
            continue
        correction = 1 - float(betas[1]) ** max(float(step), 1.0) if step is not None else 1.0
        sample = thin(as_line(v), 512).double()
        ratios.append((sample[sample > 0] / correction).sqrt() / eps)
    joined = torch.cat(ratios) if ratios else torch.empty(0)
    return float(joined.median()) if joined.numel() else None
