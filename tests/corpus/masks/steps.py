"""A single step with a masked row."""

from __future__ import annotations

import torch

from corpus import FP16, Training, planted
from corpus.architectures import Attention, attending


def fully_masked_row(fixed: bool = False, dtype: torch.dtype = FP16) -> Training:
    mask = torch.zeros(2, 6, 6)
    mask[1, :, 3:] = 1
    mask[1, 4:, :] = 0 if fixed else 1
    return attending(Attention(0.5, mask, -1e9), dtype)


PROGRAMS = [
    *planted(fully_masked_row, "mask_inf_full_row", "fault", steps=8, hazards="masked_rows", findings="NAN"),
]
