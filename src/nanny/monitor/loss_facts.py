"""What a loss tells just before backward."""

from __future__ import annotations

import torch
from torch import Tensor

from ..measure import transfer


def copied(loss: Tensor) -> Tensor:
    """A scalar of its own, in a type that the host can read."""
    return loss.detach().to(torch.float64 if loss.dtype == torch.float64 else torch.float32, copy=True)


def factor_of(root: Tensor) -> float | None:
    """The plain number by which a loss was multiplied last, if it was."""
    node = root.grad_fn
    if node is None or type(node).__name__ != "MulBackward0":
        return None
    other = getattr(node, "_saved_other", None)
    if isinstance(other, Tensor) and other.dim() == 0 and not other.requires_grad and transfer.reads_freely(other.device):
        return float(other)
    return None
