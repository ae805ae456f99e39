"""The constants of every format against torch's own casts, and what exponent histograms say against counted values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measure.plain_numbers import exponent_histograms, range_shares

from nanny.core.finding import NannyError
from nanny.core.formats import (
    BF16,
    FORMATS,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    FP64,
    HISTOGRAM_BINS,
    TARGETS,
    Format,
    exponent_of,
    format_of,
)

NARROW = [FP16, BF16, FP8_E4M3, FP8_E5M2]
BELOW_FP64 = [*NARROW, FP32]
ALL = list(FORMATS.values())


def dtype_of(fmt: Format) -> torch.dtype:
    return getattr(torch, fmt.torch_name)


def source_of(fmt: Format) -> torch.dtype:
    """torch casts fp64 to 16 and 8 bits by way of fp32, rounding twice; single rounding needs an fp32 source."""
    return torch.float64 if fmt in (FP32, FP64) else torch.float32


def cast(fmt: Format, value: float) -> float:
    source = torch.tensor(value, dtype=torch.float64).to(source_of(fmt))
    assert source.item() == value, "the test's own value must be exact in the source type"
    return source.to(dtype_of(fmt)).double().item()


def neighbour(fmt: Format, value: float, towards: float) -> float:
    """The next value of the source type in that direction."""
    kind = source_of(fmt)
    return torch.nextafter(torch.tensor(value, dtype=kind), torch.tensor(towards, dtype=kind)).double().item()


def next_value(fmt: Format, value: float) -> float:
    """The next larger value of the format itself, found by counting up its bits."""
    bits = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[fmt.bits]
    here = torch.tensor([value], dtype=torch.float64).to(dtype_of(fmt))
    return (here.view(bits) + 1).view(dtype_of(fmt)).double().item()


@pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.name)
def test_eps_largest_and_smallest_normal_are_those_of_torch(fmt):
    facts = torch.finfo(dtype_of(fmt))
    assert (fmt.max, fmt.eps, fmt.min_normal, fmt.bits) == (facts.max, facts.eps, facts.smallest_normal, facts.bits)
    assert fmt.unit_roundoff == facts.eps / 2


@pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.name)
def test_smallest_subnormal_is_the_first_value_above_zero(fmt):
    assert next_value(fmt, 0.0) == fmt.min_subnormal
    assert cast(fmt, fmt.min_subnormal) == fmt.min_subnormal


@pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.name)
def test_below_the_smallest_normal_the_spacing_no_longer_shrinks(fmt):
    assert next_value(fmt, fmt.min_normal) - fmt.min_normal == fmt.min_subnormal
    assert next_value(fmt, fmt.min_normal / 2) - fmt.min_normal / 2 == fmt.min_subnormal
    assert next_value(fmt, 2 * fmt.min_normal) - 2 * fmt.min_normal == 2 * fmt.min_subnormal


@pytest.mark.parametrize("fmt", BELOW_FP64, ids=lambda f: f.name)
@pytest.mark.parametrize("sign", [1, -1])
def test_flush_limit_itself_becomes_zero_and_its_neighbour_does_not(fmt, sign):
    assert cast(fmt, sign * fmt.flush_at) == 0
    assert cast(fmt, sign * neighbour(fmt, fmt.flush_at, 1.0)) == sign * fmt.min_subnormal


@pytest.mark.parametrize("fmt", [FP16, BF16, FP8_E5M2, FP32], ids=lambda f: f.name)
@pytest.mark.parametrize("sign", [1, -1])
def test_overflow_limit_itself_becomes_infinite_and_its_lower_neighbour_the_largest_value(fmt, sign):
    assert cast(fmt, sign * fmt.overflow_at) == sign * math.inf
    assert cast(fmt, sign * neighbour(fmt, fmt.overflow_at, 0.0)) == sign * fmt.max
    assert cast(fmt, sign * neighbour(fmt, fmt.overflow_at, math.inf)) == sign * math.inf


def test_fp16_leaves_its_range_at_65520_and_not_at_65504():
    assert (FP16.max, FP16.overflow_at) == (65504.0, 65520.0)


@pytest.mark.parametrize("value", [448.0, 464.0, 465.0, 480.0, 1e30, math.inf])
def test_e4m3_has_no_infinity_and_clamps(value):
    assert not FP8_E4M3.has_inf
    assert cast(FP8_E4M3, float(torch.tensor(value))) == FP8_E4M3.max
    assert all(f.has_inf for f in ALL if f is not FP8_E4M3)


def test_e4m3_rounds_up_to_448_from_its_lower_tie_and_not_beyond_464():
    assert cast(FP8_E4M3, 432.0) == 448.0  # tie between 416 and 448: 448 is even
    assert cast(FP8_E4M3, neighbour(FP8_E4M3, 432.0, 0.0)) == 416.0
    assert FP8_E4M3.overflow_at == 464.0


@settings(deadline=None, max_examples=200)
@given(fmt=st.sampled_from(NARROW), magnitude=st.floats(-140, 130), negative=st.booleans())
def test_spacing_is_the_distance_to_the_next_value_of_the_format(fmt, magnitude, negative):
    value = torch.tensor(2.0**magnitude, dtype=torch.float32).to(dtype_of(fmt)).double().item()
    if value >= fmt.max:  # nothing above it to measure a distance to; the spacing is that of the last binade
        assert fmt.spacing(value if math.isfinite(value) else fmt.max) == fmt.max - previous(fmt, fmt.max)
    else:
        assert fmt.spacing(-value if negative else value) == next_value(fmt, value) - value


def previous(fmt: Format, value: float) -> float:
    bits = {8: torch.uint8, 16: torch.int16}[fmt.bits]
    return (torch.tensor([value]).to(dtype_of(fmt)).view(bits) - 1).view(dtype_of(fmt)).double().item()


@settings(deadline=None, max_examples=200)
@given(fmt=st.sampled_from(NARROW), value=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_rounding_errs_by_at_most_half_a_spacing(fmt, value):
    if abs(value) < fmt.overflow_at:
        assert abs(cast(fmt, value) - value) <= fmt.spacing(value) / 2


@pytest.mark.parametrize("fmt", [FP16, BF16, FP8_E4M3, FP8_E5M2, FP32], ids=lambda f: f.name)
def test_integers_are_exact_up_to_the_stated_one_and_the_next_is_not(fmt):
    top = fmt.exact_integers
    some = torch.arange(max(0, top - 5000), top + 1, dtype=torch.float64)
    assert torch.equal(some.to(dtype_of(fmt)).double(), some)
    assert cast(fmt, top + 1) != top + 1


@pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.name)
def test_top_exponent_is_that_of_the_largest_value(fmt):
    assert 2.0**fmt.max_exponent <= fmt.max < 2 * 2.0**fmt.max_exponent or fmt is FP64
    assert math.frexp(fmt.max)[1] - 1 == fmt.max_exponent


@pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.name)
def test_format_is_found_by_short_name_torch_name_and_dtype(fmt):
    for name in (fmt.name, fmt.name.upper(), fmt.torch_name, f"torch.{fmt.torch_name}", dtype_of(fmt)):
        assert format_of(name) is fmt


def test_old_torch_names_work_too():
    assert [format_of(n) for n in ("half", "float", "double", torch.half)] == [FP16, FP32, FP64, FP16]


@pytest.mark.parametrize("name", ["fp17", "", "int8", torch.int32, None, "b f16"])
def test_unknown_format_is_refused_with_the_list_of_known_ones(name):
    with pytest.raises(NannyError, match=r"unknown floating-point format .*fp16, bf16, fp8_e4m3, fp8_e5m2"):
        format_of(name)


def test_targets_are_formats():
    assert set(TARGETS) <= set(FORMATS)


# ---- what a histogram says ----

finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
around_limits = st.builds(
    lambda exponent, fraction, negative: (-1 if negative else 1) * math.ldexp(1 + fraction / 16, exponent),
    st.integers(-40, 20),
    st.integers(0, 15),
    st.booleans(),
)
values32 = st.lists(st.one_of(finite32, around_limits, st.just(0.0)), min_size=1, max_size=60)


def is_loose(values: torch.Tensor, scaled: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Where a bin is wider than the format's border, as `range_shares` documents."""
    rounding_margin = (scaled.abs() >= fmt.overflow_at) & (scaled.abs() < 2.0 ** (fmt.max_exponent + 1))
    below_fp32 = (values != 0) & (values.abs() < 2.0**-126)
    return rounding_margin | below_fp32 | (scaled.abs() == fmt.flush_at)


@settings(deadline=None, max_examples=300)
@given(values=values32, fmt=st.sampled_from(NARROW), shift=st.integers(-30, 30))
def test_shares_of_a_histogram_are_those_of_the_counted_values(values, fmt, shift):
    values = torch.tensor(values, dtype=torch.float64)
    scaled = values * 2.0**shift
    shares = range_shares(exponent_histograms([values.float()])[0].tolist(), fmt, 2.0**shift)
    nonzero = int((values != 0).sum())
    loose = int(is_loose(values, scaled, fmt).sum())
    size = scaled.abs()
    assert shares.count == nonzero
    assert shares.zero == (len(values) - nonzero) / len(values)
    expected = {
        "flushed": ((values != 0) & (size <= fmt.flush_at)).sum(),
        "subnormal": ((size > fmt.flush_at) & (size < fmt.min_normal)).sum(),
        "saturated": (size >= fmt.overflow_at).sum(),
    }
    for name, count in expected.items():
        assert abs(getattr(shares, name) * nonzero - int(count)) <= loose + 1e-9, name


@settings(deadline=None, max_examples=200)
@given(values=st.lists(st.one_of(finite32, around_limits), min_size=1, max_size=60), fmt=st.sampled_from(NARROW))
def test_shares_at_scale_one_are_what_the_cast_does(values, fmt):
    source = torch.tensor(values, dtype=torch.float32)
    result = source.to(dtype_of(fmt)).float()
    shares = range_shares(exponent_histograms([source])[0].tolist(), fmt)
    nonzero, loose = int((source != 0).sum()), int(is_loose(source.double(), source.double(), fmt).sum())
    flushed = int(((source != 0) & (result == 0)).sum())
    left = int(result.isinf().sum()) if fmt.has_inf else int((source.abs() > fmt.overflow_at).sum())
    assert abs(shares.flushed * nonzero - flushed) <= loose + 1e-9
    assert abs(shares.saturated * nonzero - left) <= loose + 1e-9


@settings(deadline=None, max_examples=100)
@given(
    exponents=st.lists(st.integers(-100, 100), min_size=1, max_size=20),
    fmt=st.sampled_from(ALL),
    shift=st.integers(-20, 20),
)
def test_headroom_and_footroom_are_the_doublings_left(exponents, fmt, shift):
    values = torch.tensor([2.0**e for e in exponents])
    shares = range_shares(exponent_histograms([values])[0].tolist(), fmt, 2.0**shift)
    assert shares.headroom_bits == math.floor(math.log2(fmt.max) if fmt is not FP64 else 1023) - max(exponents) - shift
    assert shares.footroom_bits == min(exponents) + shift - math.log2(fmt.min_subnormal)


def test_ordinary_values_are_safe_in_fp64_and_fp32():
    histogram = exponent_histograms([torch.tensor([1e-30, 1e-3, 0.1, 1.0, 1e30])])[0].tolist()
    for fmt in (FP32, FP64):
        shares = range_shares(histogram, fmt)
        assert (shares.flushed, shares.subnormal, shares.saturated) == (0, 0, 0)


def test_values_beyond_fp32_overflow_every_format_but_fp64():
    histogram = exponent_histograms([torch.tensor([1e200, 1.0], dtype=torch.float64)])[0].tolist()
    assert [range_shares(histogram, f).saturated for f in (*NARROW, FP32, FP64)] == [0.5] * 5 + [0.0]


@pytest.mark.parametrize("shift", [-24, -10, 0, 24])
def test_scaling_the_values_is_the_same_as_asking_for_the_scale(shift):
    torch.manual_seed(0)
    values = torch.randn(5000) * 1e-4
    asked = range_shares(exponent_histograms([values])[0].tolist(), FP16, 2.0**shift)
    done = range_shares(exponent_histograms([values * 2.0**shift])[0].tolist(), FP16)
    assert asked == done


@pytest.mark.parametrize("scale", [3.0, 0.0, -2.0, math.inf, math.nan, 1.7e308, 1000])
def test_a_scale_that_is_no_power_of_two_is_refused(scale):
    with pytest.raises(NannyError, match="not a power of two"):
        range_shares([0] * HISTOGRAM_BINS, FP16, scale)


def test_nothing_seen_means_no_share_and_endless_room():
    shares = range_shares([0] * HISTOGRAM_BINS, FP16)
    assert (shares.count, shares.zero, shares.flushed, shares.saturated) == (0, 0, 0, 0)
    assert shares.headroom_bits == shares.footroom_bits == math.inf
    only_zeros = range_shares([7] + [0] * (HISTOGRAM_BINS - 1), FP16)
    assert (only_zeros.count, only_zeros.zero) == (0, 1.0)


@settings(deadline=None)
@given(value=st.floats(min_value=2.0**-126, width=32, allow_infinity=False))
def test_a_value_lies_in_the_bin_of_its_exponent(value):
    histogram = exponent_histograms([torch.tensor([value, -value])])[0].tolist()
    (index,) = [i for i, n in enumerate(histogram) if n]
    assert exponent_of(index) == math.frexp(value)[1] - 1
    assert histogram[index] == 2
