"""What an optimizer step really did to the weights, and how the optimizer rounds: on traced steps, by samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.step import OptimizerState, Update
from ..measure import transfer
from ..measure.flatten import as_line, local_part, thin
from ..measure.rows import line_of, split_small
from ..measure.transfer import PendingRead
from ..watch.optimizers import lr_of, parameters_of, states_of
from ..watch.tensors import gradient_of, is_readable, short_dtype

SAMPLE = 1024  # elements of a parameter
EPS_SAMPLE = 128
_STATE_KEYS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_avg", "momentum_buffer")
_RANK = {"float8_e5m2": 0, "float8_e4m3fn": 1, "bfloat16": 2, "float16": 3, "float32": 4, "float64": 5}


def narrowest(dtypes: set[str]) -> str:
    return min(dtypes, key=lambda name: _RANK.get(name, 9), default="")


def _samples(tensors: Sequence[Tensor], nonzero: bool = False) -> tuple[Tensor, list[int]]:
    """Samples of all of them as one line of fp32, and the length of each; small ones of one type are joined in one call.

    `nonzero`: it only matters which elements are 0.
    """
    together, alone = split_small(tensors, SAMPLE)
    parts = {i: thin(as_line(tensors[i]), SAMPLE) for i in alone}
    parts = {i: (part != 0 if nonzero else part).float() for i, part in parts.items()}
    if not alone and len(together) == 1:
        return torch.from_numpy(line_of(tensors)).to(torch.float32, copy=True), [t.numel() for t in tensors]
    for members in together.values():
        line = torch.from_numpy(line_of([tensors[i] for i in members])).float()
        parts.update(zip(members, torch.split(line, [tensors[i].numel() for i in members])))
    ordered = [parts[i] for i in range(len(tensors))]
    return torch.cat(ordered) if ordered else torch.empty(0), [part.numel() for part in ordered]


class UpdateProbe:
    """Samples of the weights before the step, compared after it; the counts are read with the other numbers of the step.

    All samples are compared in one go, and summed up by parameter: some hundred small calls less.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._parameters: list[tuple[str, Tensor, float]] = []
        weights: list[Tensor] = []
        gradients: list[Tensor] = []
        for group in optimizer.param_groups:
            lr = lr_of(group)
            for p in group["params"]:
                name = names.get(id(p))
                grad = None if name is None else gradient_of(p)
                if name is None or grad is None or not is_readable(p) or not is_readable(grad):
                    continue
                if p.shape == grad.shape and local_part(p).numel() and (not weights or p.device == weights[0].device):
                    self._parameters.append((name, p, lr))
                    weights.append(p)
                    gradients.append(grad)
        self._before, self._lengths = _samples(weights)
        self._moved = _samples(gradients, nonzero=True)[0] != 0
        self._sums: Tensor | None = None

    def after(self) -> None:
        if not self._parameters:
            return
        now, _ = _samples([p for _, p, _ in self._parameters])
        same = (now == self._before) & self._moved  # 16-bit values stay what they are in fp32
        rows = torch.stack([self._moved.float(), same.float(), (now - self._before).square(), self._before.square()])
        if transfer.reads_freely(rows.device):
            starts = np.cumsum([0, *self._lengths[:-1]])
            self._sums = torch.from_numpy(np.add.reduceat(rows.numpy(), starts, axis=1, dtype=np.float64).T)
        else:
            self._sums = torch.stack([part.sum(dim=1) for part in rows.split(self._lengths, dim=1)])

    def start_read(self) -> PendingRead:
        return PendingRead([self._sums])

    def updates(self, read: PendingRead) -> tuple[Update, ...]:
        sums = read.arrays()[0]
        if sums is None:
            return ()
        out = []
        for (name, p, lr), n, (moved, same, change, weight) in zip(self._parameters, self._lengths, sums.tolist()):
            out.append(Update(name, short_dtype(p.dtype), lr, int(moved), int(same), (change / n) ** 0.5, (weight / n) ** 0.5))
        return tuple(out)


def optimizer_state(optimizer: Optimizer) -> OptimizerState:
    """Facts that decide how it rounds. Reads a median of a small sample where that is free (CPU)."""
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    betas = group.get("betas")
    params, by_parameter = parameters_of(optimizer), states_of(optimizer)
    kept = [state for p in params if isinstance(state := by_parameter.get(p), Mapping)]
    states = {short_dtype(s[k].dtype) for s in kept for k in _STATE_KEYS if isinstance(s.get(k), Tensor)}
    eps = group.get("eps")
    return OptimizerState(
        name=type(optimizer).__name__,
        rounds_to_nearest=getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer),
        fused=bool(group.get("fused")),
        lr=lr_of(group),
        eps=float(eps) if isinstance(eps, (int, float)) else None,
        beta2=float(betas[1])
        if isinstance(betas, (tuple, list)) and len(betas) > 1 and isinstance(betas[1], (int, float))
        else None,
        param_dtype=narrowest({short_dtype(p.dtype) for p in params if p.is_floating_point()}),
        state_dtype=narrowest(states),
        eps_ratio=_eps_ratio(kept, group),
        weight_decay=_number(group.get("weight_decay")),
        decoupled=bool(group.get("decoupled_weight_decay")) or isinstance(optimizer, torch.optim.AdamW),
        maximizes=any(bool(g.get("maximize")) for g in optimizer.param_groups),
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _eps_ratio(kept: list[Any], group: Mapping[str, Any]) -> float | None:
    """Median of sqrt(v_hat)/eps over the elements that ever had a gradient: below 1, eps and not the gradient sets the step."""
    eps, betas = group.get("eps"), group.get("betas")
    if not isinstance(eps, (int, float)) or not eps or not isinstance(betas, (tuple, list)) or len(betas) < 2:
        return None
    samples = []
    for state in kept:
        v, step = state.get("exp_avg_sq"), state.get("step")
        if isinstance(v, Tensor) and v.device.type == "cpu" and is_readable(v):
            correction = 1 - float(betas[1]) ** max(float(step), 1.0) if step is not None else 1.0
            samples.append(thin(as_line(v), EPS_SAMPLE).double() / correction)
    joined = torch.cat(samples) if samples else torch.empty(0)
    joined = joined[joined > 0]
    return float(joined.median()) ** 0.5 / eps if joined.numel() else None
