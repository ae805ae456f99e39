"""The numbers of a comparison, against float64 arithmetic written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanny.core.formats import BF16, FP16
from nanny.measure.errors import channel_contributions, compare, contribution_ratio, contributions, dimension_errors, relative_l2


@pytest.mark.parametrize("shape", [(16, 40), (64, 2048), (3, 5, 7, 11)], ids=str)
@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (1e-25, 0.0), (1e20, 0.0), (1.0, 30.0), (1.0, 1000.0)])
def test_norms_angles_and_centred_errors_are_those_of_float64(shape, scale, offset):
    y = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale + offset
    x = y.bfloat16()
    stats = compare(x, y, BF16)
    a, b = x.double().numpy(), y.double().numpy()
    error = a - b
    varying = np.linalg.norm((b - b.mean(0, keepdims=True)).ravel())
    assert stats.rel_l2 == pytest.approx(np.linalg.norm(error.ravel()) / np.linalg.norm(b.ravel()), rel=1e-4)
    assert stats.centred == pytest.approx(np.linalg.norm(error.ravel()) / varying, rel=1e-2)
    assert stats.max_abs == pytest.approx(np.abs(error).max(), rel=1e-6)
    cosine = (a * b).sum() / np.linalg.norm(a.ravel()) / np.linalg.norm(b.ravel())
    assert 1 - stats.cosine == pytest.approx(1 - cosine, rel=2e-2, abs=2e-8)
    assert stats.bias == pytest.approx(error.mean() / error.std(), rel=2e-2, abs=1e-3)
    assert 0 < stats.ulp_p50 < stats.ulp_p99 <= 0.5


def test_what_is_not_finite_is_counted_and_left_out_of_the_error():
    y = torch.tensor([[1.0, 2.0, -torch.inf, torch.nan], [70000.0, 4.0, -torch.inf, 5.0]])
    x = torch.tensor([[1.0, 2.0, -torch.inf, torch.nan], [torch.inf, 4.5, -torch.inf, torch.nan]], dtype=torch.float16)
    stats = compare(x, y, FP16)
    assert (stats.nan, stats.inf, stats.reference_nan, stats.reference_inf, stats.spoiled) == (2, 3, 1, 2, 2)
    assert stats.rel_l2 == pytest.approx(0.5 / 21**0.5)
    assert stats.max_abs == 0.5


def test_a_tensor_that_became_zero_is_said_to_be():
    stats = compare(torch.zeros(4, 4), torch.full((4, 4), 1e-9), FP16)
    assert stats.all_zero
    assert stats.rel_l2 == 1
    assert stats.cosine is None
    assert not compare(torch.zeros(4), torch.zeros(4), FP16).all_zero
    assert compare(torch.ones(4), torch.zeros(4), FP16).rel_l2 == torch.inf


def test_a_batch_that_does_not_vary_has_no_centred_error():
    stats = compare(torch.full((4, 8), 3.01), torch.full((4, 8), 3.0), BF16)
    assert stats.centred is None
    assert compare(torch.randn(1, 8), torch.randn(1, 8), BF16).centred is None


def test_the_index_with_the_error_and_the_loud_one_are_found():
    y = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    y[:, 7] *= 100
    x = y.clone()
    x[:, 2] += 5
    batch, channel = dimension_errors(x, y)
    assert (batch.dim, channel.dim) == (0, 1)
    assert (channel.index, channel.loudest) == (2, 7)
    assert channel.error_share == pytest.approx(1.0)
    assert batch.error_share == pytest.approx(1 / 6, abs=1e-6)
    assert channel.rms_ratio > 50


def test_contributions_to_a_matmul_are_compared_by_index():
    a, b = torch.ones(4, 8), torch.ones(8, 3)
    a[:, 6] = 10
    b[6] = 30
    assert contribution_ratio(contributions(a.bfloat16(), b.bfloat16())) == (pytest.approx(300.0), 6)
    assert contribution_ratio(contributions(a.expand(5, 4, 8), b.expand(5, 8, 3))) == (pytest.approx(300.0), 6)


@pytest.mark.parametrize("transposed", [False, True])
def test_contributions_to_a_convolution_are_compared_by_input_channel(transposed):
    x, weight = torch.ones(2, 4, 5, 5), torch.ones(4, 6, 3, 3) if transposed else torch.ones(6, 4, 3, 3)
    x[:, 2] = 7
    (weight if transposed else weight.transpose(0, 1))[2] *= 10
    assert contribution_ratio(channel_contributions(x, weight, transposed, 1)) == (pytest.approx(70.0), 2)
    assert channel_contributions(x, weight, transposed, 2) is None


def test_the_short_way_to_the_relative_error_gives_the_same_number():
    y = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    x = y.bfloat16()
    assert relative_l2(x, y) == compare(x, y, BF16).rel_l2
    x[3, 4] = torch.inf
    assert relative_l2(x, y) == compare(x, y, BF16).rel_l2
