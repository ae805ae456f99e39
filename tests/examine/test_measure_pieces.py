"""A large tensor is compared with its twin piece by piece."""

from __future__ import annotations

import math

import pytest
import torch

from nanny.examine import measure


@pytest.mark.parametrize("strange", [0.0, math.inf, math.nan])
def test_the_error_of_a_large_tensor_is_that_of_the_whole(strange):
    draw = torch.Generator().manual_seed(5)
    twin = torch.randn(1100, 1000, generator=draw)
    real = twin.bfloat16()
    real[7, 7] = strange or real[7, 7]
    level = measure.level_of(real, twin)
    both = torch.isfinite(real)
    error = (real.double() - twin.double())[both].norm()
    assert twin.numel() > measure._PIECE
    assert level.error == pytest.approx(float(error), rel=1e-4)
    assert level.plain == pytest.approx(float(error / twin[both].double().norm()), rel=1e-4)
