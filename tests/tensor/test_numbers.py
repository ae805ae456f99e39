"""Every number of a report against exact rational arithmetic, numpy float64, or plain loops."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanny.tensor.run import analyze_tensor
from tensor import tensor_reference as exact

FORMATS = list(exact.GRID)
EXAMPLES = settings(max_examples=40, deadline=None)

floats = st.one_of(
    st.sampled_from(exact.HOSTILE),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-10, 10, width=32),
    st.floats(2.0**-27, 2.0**-12, width=32),
)
lists = st.lists(floats, min_size=1, max_size=40)
names = st.sampled_from(FORMATS)


def tensor_of(values, dtype=torch.float32):
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def as_list(x):
    return x.to(torch.float64).reshape(-1).tolist()


@given(lists, names)
@EXAMPLES
def test_range_shares_match_exact_arithmetic(values, name):
    x = as_list(tensor_of(values))
    report = analyze_tensor(tensor_of(values), name)
    assert report.ranges[0].format == name
    assert {fit.format for fit in report.ranges} == set(FORMATS)
    alive = [v for v in x if v]
    for fit in report.ranges:
        groups = {
            "flushed": [v for v in alive if exact.flushed(v, fit.format)],
            "subnormal": [v for v in alive if exact.subnormal(v, fit.format)],
            "overflowed": [v for v in alive if exact.out_of_range(v, fit.format)],
        }
        assert fit.count == len(alive)
        for field, members in groups.items():
            assert getattr(fit, field) == pytest.approx(len(members) / max(len(alive), 1), abs=1e-15), (fit.format, field)
            share = exact.energy(members) / exact.energy(alive) if alive else 0.0
            assert getattr(fit, f"{field}_energy") == pytest.approx(share, rel=1e-12, abs=1e-15), (fit.format, field)


@given(lists, names)
@EXAMPLES
def test_the_scale_window_is_the_one_found_by_trying_every_power_of_two(values, name):
    x = np.array(as_list(tensor_of(values)))
    fit = analyze_tensor(tensor_of(values), name).ranges[0]
    alive = np.abs(x[x != 0])
    if not len(alive):
        assert (fit.scale_low, fit.scale_high, fit.headroom_bits, fit.footroom_bits) == (None, None, None, None)
        return
    lowest, bits, top = exact.GRID[name][:3]
    floor = Fraction(2) ** (lowest - bits + 1)
    peak, low = Fraction(float(alive.max())), Fraction(float(np.quantile(alive, 0.01)))
    tried = range(-400, 400)
    assert fit.scale_high == max(k for k in tried if peak * Fraction(2) ** k <= top)
    assert fit.scale_low == min(k for k in tried if low * Fraction(2) ** k >= floor)
    assert fit.headroom_bits == pytest.approx(math.log2(top) - math.log2(peak), abs=1e-9)
    assert fit.footroom_bits == pytest.approx(math.log2(low) - math.log2(floor), abs=1e-9)


@given(lists, names)
@EXAMPLES
def test_cast_errors_match_exact_rounding(values, name):
    x = as_list(tensor_of(values))
    got = analyze_tensor(tensor_of(values), name).resolution
    pairs = [(v, exact.rounded(v, name)) for v in x]
    kept = [(v, y) for v, y in pairs if math.isfinite(y)]
    errors = [Fraction(v) - Fraction(y) for v, y in kept]
    size = exact.energy([v for v, _ in kept])
    error = float(sum(e * e for e in errors))
    assert got.exact == (len(kept) == len(x) and not any(errors))
    assert got.rel_l2 == pytest.approx(math.sqrt(error / size) if size else 0.0, rel=1e-9, abs=1e-300)
    alive = [(abs(e), v) for e, (v, _) in zip(errors, kept) if v]
    rms = math.sqrt(exact.energy(x) / len(x))
    ulps = [float(e / exact.ulp(v, name)) for e, v in alive] or [0.0]
    relative = [float(e) / (abs(v) + rms) for e, v in alive] or [0.0]
    assert (got.ulp_p50, got.ulp_p99) == pytest.approx(tuple(np.quantile(ulps, [0.5, 0.99])), rel=1e-9, abs=1e-12)
    assert (got.error_p50, got.error_p99) == pytest.approx(tuple(np.quantile(relative, [0.5, 0.99])), rel=1e-9, abs=1e-12)
    mean = sum(errors, Fraction(0)) / max(len(errors), 1)
    variance = float(sum((e - mean) ** 2 for e in errors)) / max(len(errors), 1)
    if got.bias is not None:
        assert got.bias == pytest.approx(float(mean) / math.sqrt(variance), rel=1e-5, abs=1e-9)
    else:
        assert variance <= 1e-8 * error / max(len(errors), 1)


offsets, widths = st.floats(-3000, 3000, width=32), st.floats(2.0**-10, 100, width=32)


@given(st.integers(2, 12), st.integers(1, 5), offsets, widths, names, st.data())
@EXAMPLES
def test_centred_error_and_spacing_ratio_match_numpy(rows, columns, offset, width, name, data):
    noise = data.draw(st.lists(st.floats(-1, 1, width=16), min_size=rows * columns, max_size=rows * columns))
    x = (torch.tensor(noise).reshape(rows, columns) * width + offset).float()
    got = analyze_tensor(x, name).resolution
    v = x.double().numpy()
    y = np.array([exact.rounded(float(e), name) for e in v.reshape(-1)]).reshape(v.shape)
    rms = math.sqrt((v**2).mean())
    deviation = math.sqrt(((v - v.mean(0)) ** 2).mean())
    if not rms:
        return
    assert got.varying == pytest.approx(deviation / rms, rel=1e-6, abs=1e-12)
    if deviation / rms > 1e-3:
        assert got.centred == pytest.approx(np.linalg.norm(v - y) / np.linalg.norm(v - v.mean(0)), rel=1e-6)
        assert got.spacing_ratio == pytest.approx(float(exact.ulp(rms, name)) / deviation, rel=1e-6)
    if deviation / rms < 1e-6:
        assert got.centred is None
        assert got.spacing_ratio is None


@given(st.lists(st.integers(-70000, 70000), min_size=1, max_size=60), names)
@EXAMPLES
def test_colliding_integers_are_counted_as_sets_count_them(values, name):
    got = analyze_tensor(torch.tensor(values, dtype=torch.float32), name).resolution.integers
    if max(map(abs, values)) <= 2 ** exact.GRID[name][1]:
        assert got is None
        return
    after = {exact.rounded(float(v), name) for v in values}
    assert (got.distinct, got.distinct_after) == (len(set(values)), len(after))
    finite = [v for v in values if math.isfinite(exact.rounded(float(v), name))]
    assert got.changed == pytest.approx(sum(exact.rounded(float(v), name) != v for v in finite) / len(values))


def test_many_integers_are_counted_with_a_bitmap():
    values = torch.randint(0, 6000, (1_100_000,), generator=torch.Generator().manual_seed(0))
    got = analyze_tensor(values.float(), "bf16").resolution.integers
    assert got.sampled == values.numel()
    assert got.distinct == len(np.unique(values.numpy()))
    assert got.distinct_after == len({exact.rounded(float(v), "bf16") for v in np.unique(values.numpy())})


def test_large_floats_are_not_taken_for_integers():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e9
    assert bool((x == x.round()).double().mean() > 0.9)
    assert analyze_tensor(x, "bf16").resolution.integers is None


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(shapes, st.data())
@EXAMPLES
def test_dimension_profiles_match_numpy(shape, data):
    n = math.prod(shape)
    x = tensor_of(data.draw(st.lists(st.floats(-100, 100, width=32), min_size=n, max_size=n))).reshape(shape)
    v = np.abs(x.double().numpy())
    total = (v**2).sum()
    for d in analyze_tensor(x).dimensions:
        others = tuple(i for i in range(v.ndim) if i != d.dim)
        rms = np.sqrt((v**2).mean(others))
        peak = v.max(others)
        assert d.size == shape[d.dim]
        assert d.silent == int((peak == 0).sum())
        for i in d.top:
            column = np.take(v, i.index, d.dim)
            assert i.rms == pytest.approx(rms[i.index])
            assert i.absmax == column.max()
            assert i.absmin == (column[column > 0].min() if column.any() else None)
            assert i.energy == pytest.approx((column**2).sum() / total if total else 0.0)
        assert sorted((i.rms for i in d.top), reverse=True) == [i.rms for i in d.top]
        alive = np.sort(rms[peak > 0])
        if len(alive):
            assert d.rms_ratio == pytest.approx(alive[-1] / alive[(len(alive) - 1) // 2])
            assert d.max_ratio == pytest.approx(peak.max() / peak[peak > 0].min())
        assert d.heat == pytest.approx(tuple(rms))


@pytest.mark.parametrize("shape", [(70, 50), (3, 40, 33), (200,), (16, 16)])
@pytest.mark.parametrize("tile", [16, (1, 32), (8, 7)])
def test_tiles_match_loops_over_slices(shape, tile):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 0, shape[-1])
    t = analyze_tensor(x, "fp8_e4m3", tile=tile).tiles
    rows, columns = ((1 if len(shape) == 1 else tile), tile) if isinstance(tile, int) else tile
    m = x.double().numpy().reshape(-1, shape[-1])
    tiles = {
        (i, j): m[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        for i in range(-(-m.shape[0] // rows))
        for j in range(-(-m.shape[1] // columns))
    }
    peaks = {place: np.abs(part).max() for place, part in tiles.items()}
    assert (t.rows, t.columns, t.count) == (rows, columns, len(tiles))
    assert t.loudest == max(peaks, key=lambda place: peaks[place])
    assert t.loudest_absmax == max(peaks.values())
    assert t.quietest_absmax == min(peaks.values())
    ordered = sorted(peaks.values())
    assert t.absmax_ratio == pytest.approx(ordered[-1] / ordered[(len(ordered) - 1) // 2])
    one, each = np.zeros_like(m), np.zeros_like(m)
    for (i, j), part in tiles.items():
        for out, peak in ((one, np.abs(m).max()), (each, peaks[i, j])):
            scale = 2.0 ** math.floor(math.log2(448 / peak))
            cast = [exact.rounded(float(v) * scale, "fp8_e4m3") / scale for v in part.reshape(-1)]
            out[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] = np.reshape(cast, part.shape)
    assert t.error_per_tensor == pytest.approx(np.linalg.norm(m - one) / np.linalg.norm(m))
    assert t.error_per_tile == pytest.approx(np.linalg.norm(m - each) / np.linalg.norm(m))
    assert t.flushed_per_tensor == pytest.approx((one == 0).mean())
    assert t.flushed_per_tile == pytest.approx((each == 0).mean())
    assert t.error_per_tile <= t.error_per_tensor


moderate = st.one_of(st.floats(-8, 8, width=16), st.sampled_from([100.0, -100.0, 0.0, 0.125, 200.0, 30000.0]))


@given(st.integers(1, 6), st.integers(2, 30), st.sampled_from(["fp16", "bf16"]), st.data())
@EXAMPLES
def test_reductions_match_float64_and_a_loop(rows, terms, name, data):
    values = data.draw(st.lists(moderate, min_size=rows * terms, max_size=rows * terms))
    x = tensor_of(values).reshape(rows, terms)
    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    by_op = {r.op: r for r in analyze_tensor(x, name, dims=1).reductions}
    v = x.double().numpy()
    sums = np.array([math.fsum(row) for row in v])
    norms = np.array([math.sqrt(math.fsum(row * row)) for row in v])
    low = x.to(dtype)
    library = {"sum": low.sum(1), "mean": low.mean(1), "norm": torch.linalg.vector_norm(low, dim=1)}
    for op, right in (("sum", sums), ("mean", sums / terms), ("norm", norms)):
        r = by_op[op]
        assert (r.terms, r.results, r.measured, r.accumulator_terms) == (terms, rows, rows, terms)
        assert r.library_overflow == int(library[op].isinf().sum())
        got = library[op].double().numpy()
        if np.isinf(got).any():
            assert r.library_error == math.inf
        elif np.linalg.norm(right) > 1e-3:
            assert r.library_error == pytest.approx(np.linalg.norm(got - right) / np.linalg.norm(right), rel=1e-6, abs=1e-12)
    loops = [exact.accumulated([exact.rounded(float(e), name) for e in row], name) for row in v]
    ends = np.array([end for end, _ in loops])
    mass = np.abs(low.double().numpy()).sum(1)
    if np.isfinite(ends).all():
        if np.linalg.norm(sums) > 1e-3:
            error = np.linalg.norm(ends - sums) / np.linalg.norm(sums)
            assert by_op["sum"].accumulator_error == pytest.approx(error, rel=1e-6, abs=1e-12)
        lost = sum(share * m for (_, share), m in zip(loops, mass)) / mass.sum() if mass.any() else 0.0
        assert by_op["sum"].swallowed == pytest.approx(lost, rel=1e-9, abs=1e-12)
    assert by_op["sum"].accumulator_overflow == int(np.isinf(ends).sum())
    alive = [(m, s) for m, s in zip(np.abs(v).sum(1), np.abs(sums)) if m]
    if alive and all(s for _, s in alive):
        kappa = sorted(m / s for m, s in alive)
        assert by_op["sum"].condition == pytest.approx(kappa[(len(kappa) - 1) // 2])


@pytest.mark.parametrize(("name", "stop"), [("bf16", 256), ("fp16", 2048)])
def test_an_accumulator_of_ones_stops_where_the_spacing_reaches_two(name, stop):
    by_op = {r.op: r for r in analyze_tensor(torch.ones(4096), name).reductions}
    assert by_op["sum"].swallowed == 1 - stop / 4096
    assert by_op["sum"].accumulator_error == 1 - stop / 4096
    assert by_op["sum"].library_error == 0
    assert by_op["sum"].equal_terms


def test_numpy_agrees_with_the_float16_accumulator_of_a_long_random_row():
    x = torch.rand(3, 3000, generator=torch.Generator().manual_seed(2))
    r = analyze_tensor(x, "fp16", dims=1).reductions[0]
    terms = x.numpy().astype(np.float16)
    acc = np.zeros(3, dtype=np.float16)
    for column in terms.T:
        acc = acc + column
    right = x.double().sum(1).numpy()
    assert r.accumulator_error == pytest.approx(np.linalg.norm(acc.astype(float) - right) / np.linalg.norm(right), rel=1e-9)


def test_what_was_sampled_is_said():
    x = torch.randn(300, 9000, generator=torch.Generator().manual_seed(0))
    r = analyze_tensor(x, dims=1).reductions[0]
    assert (r.results, r.measured) == (300, (1 << 20) // 9000)
    assert (r.accumulator_results, r.accumulator_terms) == (r.measured, 4096)
    text = str(analyze_tensor(x, dims=1))
    assert f"{r.measured} of 300 results; acc: {r.measured} x 4096 terms" in text
    assert "quantiles are from 131072 elements" in text


SOURCES = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", SOURCES)
def test_every_source_dtype_is_measured_like_its_float64_copy(dtype):
    x = (torch.randn(40, 30, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    mine, wide = analyze_tensor(x, "bf16"), analyze_tensor(x.double(), "bf16")
    assert mine.ranges == wide.ranges
    assert mine.values == wide.values
    assert mine.dimensions == wide.dimensions
    assert mine.resolution.rel_l2 == wide.resolution.rel_l2
    assert mine.resolution.same_dtype == (dtype == torch.bfloat16)


def test_float64_beyond_the_range_of_float32_is_measured():
    x = torch.tensor([1e300, -1e300, 1e-300, 1.0], dtype=torch.float64)
    report = analyze_tensor(x, "bf16")
    assert report.values.rms == pytest.approx(1e300 / math.sqrt(2))
    assert report.ranges[0].overflowed == 0.5
    assert report.ranges[0].flushed == 0.25
    assert report.ranges[0].overflowed_energy == pytest.approx(1)


def test_float64_values_go_through_float32_as_in_torch_itself():
    just_above = 2.0**-25 * (1 + 2.0**-40)
    x = torch.tensor([just_above, 65520 * (1 - 2.0**-40), 1.0], dtype=torch.float64)
    fit = analyze_tensor(x, "fp16").ranges[0]
    cast = x.to(torch.float16)
    assert fit.flushed == pytest.approx(float(((cast == 0) & (x != 0)).double().mean()))
    assert fit.overflowed == pytest.approx(float(cast.isinf().double().mean()))


LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "strided": lambda x: torch.stack([x, x * 9], -1)[..., 0],
    "reversed twice": lambda x: x.flip(0).contiguous().flip(0),
    "a parameter": lambda x: torch.nn.Parameter(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_change_the_numbers(layout):
    x = torch.randn(700, 500, generator=torch.Generator().manual_seed(4))
    got, want = (numbers_in(analyze_tensor(t, "fp16").to_json()) for t in (LAYOUTS[layout](x), x))
    assert got == pytest.approx(want, rel=1e-9)


def numbers_in(value, path=""):
    """Every number of a report by its path; the order of summation may change the last digits."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: n for name, part in items for key, n in numbers_in(part, f"{path}.{name}").items()}
    return {path: value} if isinstance(value, (int, float)) else {}


def test_an_expanded_tensor_counts_as_many_elements_as_it_shows():
    x = torch.tensor([[1.0], [2.0]]).expand(2, 300_000)
    report = analyze_tensor(x)
    assert (report.values.count, report.values.mean) == (600_000, 1.5)
    assert report.dimensions[0].top[0].energy == pytest.approx(0.8)


def test_a_tensor_of_several_blocks_matches_numpy():
    x = torch.randn(3, 700, 500, generator=torch.Generator().manual_seed(5)) * 1e-6
    report = analyze_tensor(x, "fp16")
    v = x.double().numpy()
    half = x.numpy().astype(np.float16).astype(np.float64)
    assert report.values.rms == pytest.approx(np.sqrt((v**2).mean()), rel=1e-12)
    assert report.values.mean == pytest.approx(v.mean(), rel=1e-9)
    assert report.resolution.rel_l2 == pytest.approx(np.linalg.norm(v - half) / np.linalg.norm(v), rel=1e-9)
    centred = np.linalg.norm(v - half) / np.linalg.norm(v - v.mean(0))
    assert report.resolution.centred == pytest.approx(centred, rel=1e-9)
    assert report.ranges[0].flushed == pytest.approx((half == 0).mean())
    assert [d.top[0].rms for d in report.dimensions] == pytest.approx(
        [np.sqrt((v**2).mean(tuple(i for i in range(3) if i != dim))).max() for dim in range(3)]
    )


def test_non_finite_elements_are_counted_and_kept_out_of_every_other_number():
    clean = torch.randn(64, 8, generator=torch.Generator().manual_seed(6))
    dirty = torch.cat([clean, torch.tensor([[math.nan] * 3 + [math.inf] * 4 + [-math.inf]])])
    got, want = analyze_tensor(dirty, "fp16"), analyze_tensor(clean, "fp16")
    v = got.values
    assert (v.nan, v.posinf, v.neginf, v.finite) == (3, 4, 1, clean.numel())
    assert got.ranges == want.ranges
    assert got.resolution.rel_l2 == pytest.approx(want.resolution.rel_l2)
    assert got.resolution.centred == pytest.approx(want.resolution.centred)
    assert (v.mean, v.rms) == pytest.approx((want.values.mean, want.values.rms))
    assert got.dimensions[1].top[0].rms == pytest.approx(want.dimensions[1].top[0].rms * math.sqrt(64 / 65))
    assert [r.library_overflow for r in got.reductions] == [0] * 6


def test_a_single_value_is_measured():
    report = analyze_tensor(torch.tensor(0.1), "fp16")
    assert report.shape == ()
    assert report.resolution.rel_l2 == pytest.approx(abs(float(np.float16(0.1)) - float(np.float32(0.1))) / 0.1, rel=1e-6)
    assert report.dimensions == report.reductions == ()


def test_the_tensor_and_the_random_state_are_left_alone():
    x = torch.randn(100, 100)
    before, state = x.clone(), torch.get_rng_state()
    analyze_tensor(x, "fp16", tile=16)
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_autocast_default_dtype_and_default_device_do_not_change_the_report():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(7))
    want = analyze_tensor(x, "fp16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert analyze_tensor(x, "fp16") == want
    torch.set_default_dtype(torch.float64)
    try:
        assert analyze_tensor(x, "fp16") == want
        with torch.device("meta"):
            assert analyze_tensor(x, "fp16") == want
    finally:
        torch.set_default_dtype(torch.float32)


anything = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, 5e-324, 1.7e308, -1.7e308, *exact.HOSTILE]), st.floats(width=64), floats
)


@given(st.lists(anything, min_size=1, max_size=24), st.sampled_from(SOURCES), names)
@EXAMPLES
def test_any_mixture_is_counted_right_and_every_share_is_a_share(values, dtype, name):
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    source = as_list(x)
    finite = [v for v in source if math.isfinite(v)]
    if not finite:
        return
    report = analyze_tensor(torch.stack([x, x]), name, tile=(1, 16))
    v = report.values
    assert (v.nan, v.posinf, v.neginf) == (
        2 * sum(map(math.isnan, source)), 2 * source.count(math.inf), 2 * source.count(-math.inf),
    )  # fmt: skip
    assert (v.minimum, v.maximum) == (min(finite), max(finite))
    assert v.nonzero == 2 * sum(e != 0 for e in finite)
    peak = max(map(abs, finite))
    if peak:
        scaled = [float(Fraction(e) / Fraction(peak)) for e in finite]
        assert v.rms / peak == pytest.approx(math.sqrt(math.fsum(e * e for e in scaled) / len(finite)))
    for fit in report.ranges:
        shares = [fit.flushed, fit.subnormal, fit.overflowed, fit.flushed_energy, fit.subnormal_energy, fit.overflowed_energy]
        assert all(0 <= share <= 1 + 1e-12 for share in shares)
    assert str(report)
