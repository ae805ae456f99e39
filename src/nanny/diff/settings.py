"""What `auto_diff` was asked to do with a model and a batch, and the loss that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.finding import NannyError
from ..core.formats import Format, format_of
from ..core.limits import Limits
from ..measure.errors import compare
from ..measure.records import ErrorStats
from ..watch.tensors import LOW, float_leaves


@dataclass(frozen=True)
class DiffSettings:
    """`replace` one of its fields for another batch, or for a run of the same one under other conditions."""

    model: nn.Module
    target: Format
    reference: str
    policy: str
    backward: bool
    own: bool  # measure each layer's own error
    loss_fn: Callable[..., Any] | None
    loss_scale: float | None
    limits: Limits
    device: str = "cpu"  # type of the device that the model is on
    batch: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})  # arguments of the model
    labels: Any = None  # second argument of the loss function
    wide: tuple[str, ...] = ()  # modules to keep in FP32
    closely: bool = False  # find the operations that make NaN, Inf and large errors: a pass over every result
    on_call: Callable[[str], None] | None = None  # told of every module call, for a progress line

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.target.torch_name)
        return dtype

    def errors(self, real: Tensor, reference: Tensor) -> ErrorStats:
        """In spacings of its own low format, or of the target where it has none."""
        return compare(real, reference, format_of(real.dtype) if real.dtype in LOW else self.target, self.limits)


def loss_of(output: Any, settings: DiffSettings) -> tuple[Tensor | None, str]:
    """The loss to go backward from: the user's, the model's own, or a fixed mix of its outputs."""
    if settings.loss_fn is not None:
        loss = settings.loss_fn(output) if settings.labels is None else settings.loss_fn(output, settings.labels)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise NannyError("loss_fn must return a tensor with a single number")
        return (loss, "") if loss.requires_grad else (None, "the loss does not depend on any parameter; no backward pass")
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.numel() == 1 and own.requires_grad:
        return own, "backward from the loss that the model returns"
    leaves = [t for t in float_leaves(output) if t.requires_grad]
    if not leaves:
        return None, "the output does not depend on any parameter; no backward pass"
    generator = torch.Generator().manual_seed(0)
    parts = []
    for leaf in leaves:
        weights = torch.randn(leaf.shape, generator=generator).to(leaf.device)
        parts.append((leaf.float() * weights).mean())
    return torch.stack(parts).sum(), "no loss_fn: gradients are of a fixed random mix of the outputs; give the loss for real ones"
