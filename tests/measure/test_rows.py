"""Packed rows and histograms against float64, on every type, layout and size that a training run may hold."""

from __future__ import annotations

import contextlib
import math
import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from measure.plain_numbers import exponent_histograms, measure_tensors
from nanny.core.formats import ABOVE_BIN, BELOW_BIN, FIRST_BIN, HISTOGRAM_BINS, LAST_BIN, NONFINITE_BIN, ZERO_BIN
from nanny.measure import transfer
from nanny.measure.flatten import as_line, thin
from nanny.measure.histogram import SAMPLE
from nanny.measure.rows import HostLayout, RowBuffer, count_nonfinite, pack_gradients, which_are_zero

DTYPES = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.float64]
# Sums are taken in fp32 (fp64 inputs: fp64) in many lanes and blocks. A million squares of values with few bits round alike, up
# or down, and drift by 7e-5 at most; a few hundred stay within some units of the last place.
SUM_TOLERANCE = 2.0**-19
LARGE_SUM_TOLERANCE = 1e-4


def as_float64(tensor: torch.Tensor) -> np.ndarray:
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    return wide.double().contiguous().numpy().reshape(-1)


def expected_histogram(values: np.ndarray) -> list[int]:
    out = [0] * HISTOGRAM_BINS
    for value in values.tolist():
        if not math.isfinite(value):
            out[NONFINITE_BIN] += 1
        elif value == 0:
            out[ZERO_BIN] += 1
        else:
            exponent = math.frexp(value)[1] - 1
            out[BELOW_BIN if exponent < -126 else ABOVE_BIN if exponent > 127 else FIRST_BIN + exponent + 126] += 1
    return out


def assert_true_to_float64(tensor: torch.Tensor, histogram: bool = True) -> None:
    tolerance = SUM_TOLERANCE if tensor.numel() < 5000 else LARGE_SUM_TOLERANCE
    (stats,) = measure_tensors([tensor], histogram=histogram)
    values = as_float64(tensor)
    assert stats.count == values.size
    if values.size == 0:
        assert (stats.minimum, stats.maximum, stats.sum_squares, stats.mean, stats.nonfinite) == (0, 0, 0, 0, False)
        return
    counts = np.isnan(values).sum(), np.isposinf(values).sum(), np.isneginf(values).sum()
    assert (stats.nan, stats.posinf, stats.neginf) == counts
    assert stats.nonfinite == bool(sum(counts))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal([stats.minimum, stats.maximum], [values.min(), values.max()])
        np.testing.assert_array_equal(stats.absmax, np.abs(values).max())
        np.testing.assert_allclose(stats.sum_squares, np.square(values).sum(), rtol=tolerance, atol=0)
        if stats.nonfinite and np.isinf(np.abs(values[np.isfinite(values)]).sum()):
            assert not np.isfinite(stats.mean)  # parts of the sum leave float64, and which is a matter of order
        elif stats.nonfinite:
            np.testing.assert_array_equal(stats.mean, values.sum())  # NaN or an infinity, whatever the count
        elif np.isfinite(np.abs(values).sum()):  # else the sum leaves even fp64, or not, depending on the order
            np.testing.assert_allclose(stats.mean, values.mean(), rtol=0, atol=tolerance * np.abs(values).mean() + 5e-324)
    if histogram and values.size <= SAMPLE:
        assert list(stats.histogram) == expected_histogram(values)


def small_shapes(max_elements: int = 200) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, 7), max_size=4).map(tuple).filter(lambda s: math.prod(s) <= max_elements)


@st.composite
def tensors(draw: st.DrawFn, specials: bool = False) -> torch.Tensor:
    """Any floating-point type, shape and magnitude; with `specials`, NaN and infinities among the values."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(small_shapes())
    wide = dtype == torch.float64
    value = st.floats(allow_nan=specials, allow_infinity=specials, width=64 if wide else 32)
    if not specials:
        value = st.one_of(value, st.floats(-4, 4), st.just(0.0))
    flat = draw(st.lists(value, min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(flat, dtype=torch.float64 if wide else torch.float32).to(dtype).reshape(shape)


@settings(deadline=None, max_examples=250)
@given(tensor=tensors())
def test_every_number_is_that_of_float64(tensor):
    if tensor.dtype.itemsize > 1 and not tensor.isfinite().all():
        tensor = tensor.nan_to_num()  # a huge fp32 value became infinite in the narrow type; the next test is about those
    assert_true_to_float64(tensor)


@settings(deadline=None, max_examples=150)
@given(tensor=tensors(specials=True))
def test_nan_and_infinities_are_counted_exactly(tensor):
    assert_true_to_float64(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_nan_and_all_infinite_tensors_are_counted(dtype):
    assert measure_tensors([torch.full((3, 4), math.nan).to(dtype)])[0].nan == 12
    if dtype != torch.float8_e4m3fn:  # it has no infinity
        mixed = torch.tensor([math.inf, -math.inf, -math.inf, 1.0]).to(dtype)
        (stats,) = measure_tensors([mixed])
        assert (stats.nan, stats.posinf, stats.neginf) == (0, 1, 2)
        assert (stats.minimum, stats.maximum) == (-math.inf, math.inf)


@settings(deadline=None, max_examples=150)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_layout_does_not_change_the_numbers(data, dtype):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=4).map(tuple))
    seed = data.draw(st.integers(0, 2**31))
    base = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    layout = data.draw(st.sampled_from(["permuted", "sliced", "stepped", "expanded", "offset", "diagonal", "scalar"]))
    if layout == "permuted":
        view = base.permute(data.draw(st.permutations(range(base.ndim))))
    elif layout == "sliced":
        view = base[..., : max(1, shape[-1] - 1)]
    elif layout == "stepped":
        view = base[:, ::2]
    elif layout == "expanded":
        view = base[:1].expand(3, *shape[1:])
    elif layout == "offset":
        view = base.reshape(-1)[1:]
    elif layout == "diagonal":
        view = base.reshape(shape[0], -1).diagonal()
    else:
        view = base[(0,) * len(shape)]
    assert_true_to_float64(view)


def test_a_transposed_tensor_is_measured_where_it_lies():
    tensor = torch.randn(5, 6, 7)[2:].permute(2, 0, 1)
    assert as_line(tensor).data_ptr() == tensor.data_ptr()
    assert sorted(as_line(tensor).tolist()) == sorted(tensor.flatten().tolist())


def test_channels_last_is_measured_where_it_lies():
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert as_line(tensor).data_ptr() == tensor.data_ptr()
    assert_true_to_float64(tensor)


def test_a_lazily_negated_view_is_measured_negated():
    assert_true_to_float64(torch.randn(7, dtype=torch.complex64).conj().imag)
    assert_true_to_float64(torch._neg_view(torch.arange(1.0, 6.0)))


def test_parameters_and_graph_tensors_are_measured_without_joining_the_graph(monkeypatch):
    weight = torch.nn.Parameter(torch.randn(4, 4))
    monkeypatch.setattr(transfer, "reads_freely", lambda device: False)
    buffer = RowBuffer()
    buffer.add(weight @ weight)
    assert not any(number.requires_grad for number in buffer._rows[0])
    assert_true_to_float64((weight @ weight).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e-18, 1e-15, 1e14, 1e15, 1e18, 1e30])
def test_magnitudes_whose_squares_leave_fp32_keep_their_norm(dtype, size):
    torch.manual_seed(1)
    assert_true_to_float64((torch.randn(3000, dtype=torch.float64) * size).to(dtype))


def test_fp64_beyond_fp32_keeps_its_numbers_and_its_square_is_that_of_float64():
    assert_true_to_float64(torch.tensor([1e200, -3e100, 1.0], dtype=torch.float64))
    assert_true_to_float64(torch.tensor([1e-200, 1e-310, 0.0], dtype=torch.float64))


def test_several_tensors_of_mixed_types_get_a_row_each():
    mixed = [torch.full((3,), 2.0).to(dtype) for dtype in DTYPES] + [torch.zeros(0), torch.tensor(5.0)]
    stats = measure_tensors(mixed, histogram=True)
    assert [s.mean for s in stats] == [2.0] * 6 + [0.0, 5.0]
    assert [s.count for s in stats] == [3] * 6 + [0, 1]
    assert [sum(s.histogram) for s in stats] == [3] * 6 + [0, 1]


def test_no_tensors_give_no_rows():
    assert measure_tensors([], histogram=True) == []
    assert exponent_histograms([]).shape == (0, HISTOGRAM_BINS)


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=40), seed=st.integers(0, 1000))
def test_histograms_of_many_small_tensors_do_not_mix(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    many = [torch.randn(n, generator=generator).to(DTYPES[(n + seed) % len(DTYPES)]) for n in lengths]
    for tensor, histogram in zip(many, exponent_histograms(many).tolist()):
        assert histogram == expected_histogram(as_float64(tensor))


def test_bins_at_the_borders_of_fp32():
    edges = torch.tensor([0.0, -0.0, 1e-45, 2.0**-126, -(2.0**-126), 2.0**127, 3.4028234e38, math.inf, math.nan])
    histogram = exponent_histograms([edges])[0].tolist()
    seen = {i: n for i, n in enumerate(histogram) if n}
    assert seen == {ZERO_BIN: 2, BELOW_BIN: 1, FIRST_BIN: 2, LAST_BIN: 2, NONFINITE_BIN: 2}


@pytest.mark.landing
@pytest.mark.representative(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_sixteen_million_elements_are_summed_without_drift(dtype):
    torch.manual_seed(2)
    assert_true_to_float64((torch.rand(2**24 + 12345) + 0.5).to(dtype), histogram=False)


def test_a_line_of_several_parts_is_measured_to_its_end():
    tensor = torch.ones(2**24 + 3, dtype=torch.bfloat16)
    tensor[-1], tensor[-2] = -7.0, 9.0
    (stats,) = measure_tensors([tensor])
    assert (stats.minimum, stats.maximum) == (-7.0, 9.0)
    assert stats.sum_squares == pytest.approx(2**24 + 1 + 49 + 81, rel=2.0**-23)
    counts, pending = pack_gradients([tensor])
    assert counts == (2**24 + 3,)
    assert pending.arrays()[0][1:, 0].tolist() == [-7.0, 9.0]
    tensor[-1] = math.nan
    assert count_nonfinite(tensor) == (1, 0, 0)


@pytest.mark.slow
def test_over_two_to_the_31_elements_are_measured_to_the_end():
    n = 2**31 + 5
    tensor = torch.empty(n, dtype=torch.float8_e5m2)
    tensor.view(torch.uint8).fill_(0x3C)  # 1.0
    tensor.view(torch.uint8)[-1] = 0xBC + 4  # -2.0
    (stats,) = measure_tensors([tensor], histogram=True)
    assert (stats.count, stats.minimum, stats.maximum) == (n, -2.0, 1.0)
    assert stats.sum_squares == pytest.approx(n - 1 + 4, rel=1e-6)
    assert stats.mean == pytest.approx((n - 1 - 2) / n, rel=1e-6)
    assert sum(stats.histogram) == SAMPLE
    tensor.view(torch.uint8)[-1] = 0x7F
    assert count_nonfinite(tensor) == (1, 0, 0)


# ---- gradients, every step ----


@settings(deadline=None, max_examples=80)
@given(several=st.lists(tensors(), min_size=1, max_size=6))
def test_gradient_rows_agree_with_float64(several):
    counts, pending = pack_gradients(several)
    (rows,) = pending.arrays()
    for i, tensor in enumerate(several):
        values = as_float64(tensor)
        assert counts[i] == values.size
        if values.size:
            np.testing.assert_array_equal(rows[1:, i], [values.min(), values.max()])
        size = float(np.abs(values).max()) if values.size else 0.0
        if 1e-15 < size < 1e15:  # elsewhere fp32 cannot hold the square, and a step's rows are not repaired
            np.testing.assert_allclose(rows[0, i], np.square(values).sum(), rtol=SUM_TOLERANCE)


def test_buffered_rows_are_those_of_the_moment_they_were_added():
    tensor = torch.randn(40, 50)
    before = measure_tensors([tensor, tensor.double()], histogram=True)
    buffer = RowBuffer()
    buffer.add(tensor, histogram=True)
    buffer.add(tensor.double())
    tensor.fill_(math.nan)
    assert (len(buffer), buffer.is_bad(0), buffer.add(tensor), buffer.is_bad(2)) == (2, False, 2, True)
    values, histograms = buffer.start_read().table()
    assert values[:4, 0].tolist() == [2000, before[0].minimum, before[0].maximum, before[0].sum_squares]
    assert values[4, 0] / 2000 == before[0].mean
    assert histograms[0].tolist() == list(before[0].histogram)
    assert histograms[1].sum() == 0


# ---- whatever mode the run is in ----


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", dtype=torch.float16),
        torch.inference_mode,
        torch.no_grad,
        deterministic,
        lambda: torch.device("meta"),
        lambda: default_dtype(torch.float64),
        lambda: default_dtype(torch.bfloat16),
    ],
    ids=["autocast bf16", "autocast fp16", "inference", "no_grad", "deterministic", "device meta", "fp64", "bf16"],
)
def test_the_mode_of_the_run_does_not_change_the_numbers(mode):
    generator = torch.Generator().manual_seed(5)
    work = [torch.randn(n, generator=generator).to(dtype) for n in (3, 40_000, 70_000) for dtype in DTYPES]
    expected = measure_tensors(work, histogram=True)
    gradients = pack_gradients(work)[1].arrays()[0]
    with mode():
        assert measure_tensors(work, histogram=True) == expected
        np.testing.assert_array_equal(pack_gradients(work)[1].arrays()[0], gradients)


# ---- it never disturbs the run ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [10, SAMPLE, SAMPLE + 1, 100_000])
def test_measuring_changes_no_bit_of_the_tensor(dtype, n):
    tensor = torch.randn(n).to(dtype)
    bits = tensor.view(torch.uint8).clone()
    version = tensor._version
    measure_tensors([tensor, tensor[1:]], histogram=True)
    pack_gradients([tensor])
    count_nonfinite(tensor)
    assert torch.equal(tensor.view(torch.uint8), bits)
    assert tensor._version == version


def test_measuring_touches_no_random_generator():
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    measure_tensors([torch.ones(100_000), torch.ones(5, dtype=torch.bfloat16)], histogram=True)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


READS_BY_METHOD = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__array__")


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait: scalars read, shapes that depend on data, copies to the CPU."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        kwargs = kwargs or {}
        to_cpu = name == "_to_copy" and kwargs.get("device") == torch.device("cpu") and args[0].device.type != "cpu"
        if name in self.WAITING or to_cpu:
            self.seen.append(name)
        return func(*args, **kwargs)


def host_reads(monkeypatch, work) -> list[str]:
    mode = HostReads()

    def counting(name):
        original = getattr(torch.Tensor, name)

        def method(self, *args, **kwargs):
            mode.seen.append(f"Tensor.{name}")
            return original(self, *args, **kwargs)

        return method

    with monkeypatch.context() as patch, mode:
        for name in READS_BY_METHOD:
            patch.setattr(torch.Tensor, name, counting(name))
        work()
    return mode.seen


def training_tensors(device: str) -> list[torch.Tensor]:
    shapes = [(), (0, 3), (5,), (64, 64), (40, 1000), (1200, 1000)]
    plain = [torch.ones(shape, device=device).to(dtype) for shape in shapes for dtype in DTYPES]
    return [*plain, torch.ones(30, 40, device=device).t(), torch.ones(30, 40, device=device)[:, ::2]]


def test_the_device_is_never_waited_for(monkeypatch):
    """A meta tensor has no values: whoever tries to read one fails. Every path but the CPU's own is taken on it."""
    work = training_tensors("meta")
    buffer = RowBuffer()
    assert host_reads(monkeypatch, lambda: [buffer.add(t, histogram=True) for t in work]) == []
    assert buffer.is_bad(0) is None


def test_the_counter_of_host_reads_sees_each_kind_of_read(monkeypatch):
    tensor = torch.ones(3)
    for name, read in {
        "Tensor.item": lambda: tensor.sum().item(),
        "Tensor.tolist": lambda: tensor.tolist(),
        "Tensor.__bool__": lambda: bool(tensor[0]),
        "Tensor.__float__": lambda: float(tensor[0]),
        "Tensor.numpy": lambda: tensor.numpy(),
        "nonzero": lambda: tensor.nonzero(),
        "_local_scalar_dense": lambda: torch.arange(5)[tensor[0].long() :],
    }.items():
        assert name in host_reads(monkeypatch, read), name


def test_reading_rows_copies_to_the_host_once_for_all_tensors(monkeypatch):
    monkeypatch.setattr(transfer, "reads_freely", lambda device: False)
    rows = RowBuffer()
    for _ in range(30):
        rows.add(torch.randn(10))
    assert host_reads(monkeypatch, lambda: rows.start_read().table()) == ["Tensor.numpy"]


def mixed() -> list[torch.Tensor]:
    """Small and large, of several types, in no order, some with nothing but zeros, some not finite."""
    torch.manual_seed(3)
    values = [torch.randn(shape, dtype=torch.float64) for shape in [(3,), (5000,), (2, 7), (64, 64), (1,), (70, 100)]]
    values += [torch.zeros(6), torch.zeros(5000), torch.tensor([1.0, float("nan")]), torch.tensor([float("inf")]), torch.zeros(0)]
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
    return [value.to(dtype) for value in values for dtype in dtypes] + [torch.randn(8, 6).t(), torch.nn.Parameter(torch.randn(9))]


@pytest.mark.parametrize("sample", [64, 4096, 16384])
def test_tensors_measured_together_have_the_numbers_they_have_alone(sample):
    together, alone = RowBuffer(sample), RowBuffer(sample)
    together.add(torch.ones(3))  # without a histogram
    alone.add(torch.ones(3))
    together.add_all(mixed())
    for tensor in mixed():
        alone.add(tensor, histogram=True)
        alone.is_bad(len(alone) - 1)
        alone._measure_copies()
    assert together.bad_rows() == [i for i in range(len(alone)) if alone.is_bad(i)] != []
    (values, histograms), (expected, expected_histograms) = together.start_read().table(), alone.start_read().table()
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    np.testing.assert_array_equal(histograms, expected_histograms)
    assert not histograms[0].any()


def test_which_are_zero_is_told_of_each():
    tensors = [tensor for tensor in mixed() if tensor.numel()]
    assert which_are_zero(tensors) == [not bool((tensor != 0).any()) for tensor in tensors]
    assert which_are_zero([]) == []


# ---- the sample ----


def channels_met(shape: tuple[int, ...], dim: int) -> int:
    labels = torch.arange(shape[dim], dtype=torch.int32).view([-1 if d == dim else 1 for d in range(len(shape))])
    return thin(as_line(labels.expand(shape)), SAMPLE).unique().numel()


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((2048, 4096), 1),
        ((1024, 4096), 0),
        ((4096, 1024), 1),
        ((1024, 1024), 1),
        ((8, 1024, 768), 2),
        ((8, 256, 3072), 1),
        ((256, 64, 32, 32), 1),
        ((1024, 64, 8, 8), 1),
        ((4, 16, 512, 64), 1),
        ((1023, 1000), 1),
        ((16, 3, 224, 224), 1),
        ((1266, 96, 17), 1),
        ((64, 128, 56, 56), 1),
    ],
)
def test_the_sample_meets_every_channel(shape, dim):
    assert channels_met(shape, dim) == shape[dim]


@settings(deadline=None, max_examples=60)
@given(shape=st.lists(st.sampled_from([2, 3, 4, 7, 8, 12, 16, 31, 64, 96, 100, 128]), min_size=2, max_size=4), data=st.data())
def test_the_sample_meets_every_channel_of_any_regular_layout(shape, data):
    shape = tuple(shape)
    if math.prod(shape) > 2**22:
        return
    dim = data.draw(st.integers(0, len(shape) - 1))
    assert channels_met(shape, dim) == shape[dim]


@pytest.mark.parametrize("n", [SAMPLE - 1, SAMPLE, SAMPLE + 1, SAMPLE + 17, 2 * SAMPLE - 1, 3 * SAMPLE + 5, 1_000_003])
def test_the_sample_keeps_its_size_and_spreads_over_the_whole_line(n):
    places = thin(torch.arange(n), SAMPLE)
    assert len(places) == min(n, SAMPLE)
    assert len(places.unique()) >= 0.7 * len(places)
    section = n / (SAMPLE // 16)
    assert places[-1] >= n - section - 32
    assert places.sort().values.diff().max() <= 2 * section + 32


def test_a_sampled_histogram_estimates_the_full_one():
    torch.manual_seed(4)
    values = torch.randn(1000, 1000)
    sampled = exponent_histograms([values])[0] / SAMPLE
    full = exponent_histograms([values], sample=2**30)[0] / values.numel()
    assert (sampled - full).abs().max() < 0.02


# ---- DTensor ----


@pytest.mark.slow
def test_of_a_distributed_tensor_the_local_part_is_measured():
    script = """
        import os, torch, torch.distributed as dist
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
        from torch.distributed.device_mesh import init_device_mesh
        from nanny.measure.rows import HostLayout, RowBuffer, pack_gradients

        def table(tensors):
            rows = RowBuffer()
            for tensor in tensors:
                rows.add(tensor, histogram=True)
            return rows.start_read().table()

        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.arange(-3.0, 9.0).view(3, 4)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        assert isinstance(sharded, DTensor)
        weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Replicate()]))
        for local, expected in zip(table([sharded, weight, sharded.t()]), table([whole] * 3)):
            assert (local == expected).all()
        squares, low, high = pack_gradients([sharded])[1].arrays()[0][:, 0]
        assert abs(squares - 218) < 1e-4 and (low, high) == (-3, 8)
        dist.destroy_process_group()
        print("measured")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "measured"), done.stderr


def test_gradients_are_packed_alike_by_a_layout_that_was_made_for_others():
    draw = torch.Generator().manual_seed(3)
    several = [torch.randn(n, generator=draw).to(dtype) for n in (7, 5000, 1) for dtype in (torch.float32, torch.bfloat16)]
    layout = HostLayout([torch.ones_like(t) for t in several])
    assert layout.fits(several)
    np.testing.assert_array_equal(pack_gradients(several, layout)[1].arrays()[0], pack_gradients(several)[1].arrays()[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[:-1],
        lambda t: t.double(),
        lambda t: t.to_sparse(),
        lambda t: t.to("meta"),
        torch.nn.Parameter,
        lambda t: _without_memory(t),
        lambda t: _without_memory(torch.cat([t, t]), len(t)),  # of a bucket that was freed: its address is not 0
    ],
)
def test_a_layout_does_not_fit_a_tensor_of_another_kind(change):
    known = [torch.ones(3), torch.ones(5)]
    layout = HostLayout(known)
    assert layout.fits(known)
    assert not layout.fits([known[0], change(known[1])])


def _without_memory(tensor, start=0):
    part = tensor.clone()[start:]
    part.untyped_storage().resize_(0)
    return part
