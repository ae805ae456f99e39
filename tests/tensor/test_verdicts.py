"""Healthy tensors stay silent, sick ones are named: `analyze_tensor` as its user sees it."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanny import Severity, analyze_tensor
from nanny.core.formats import format_of
from nanny.core.limits import Limits
from nanny.tensor.judge import PAGES, judge_tensor
from nanny.tensor.text import heat_line, render_tensor

HALF = ["fp16", "bf16"]
FP8 = ["fp8_e4m3", "fp8_e5m2"]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def codes(report, least=Severity.INFO):
    return {f.code for f in report.findings if f.severity >= least}


SHAPES = [
    (1,), (2,), (7,), (100,), (4097,), (100_000,), (3, 5), (2, 20_000), (20_000, 2), (8, 16, 32), (4, 3, 16, 16), (5000, 8),
]  # fmt: skip


@pytest.mark.representative(8)
@pytest.mark.parametrize("target", HALF + FP8)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gaussian_of_any_shape_raises_nothing(shape, target):
    assert analyze_tensor(torch.randn(shape), target).findings == ()


def zipf_gradient():
    """An embedding's gradient: rows are hit as often as words occur, most not at all."""
    rows = (1 / torch.rand(20_000)).long().clamp(max=4999)
    return torch.zeros(5000, 32).index_add_(0, rows, torch.randn(20_000, 32) * 1e-3)


def random_signs(*shape):
    return torch.randn(shape).sign()


HEALTHY = {
    "Kaiming weights": lambda: nn.init.kaiming_normal_(torch.empty(512, 1024)),
    "a Linear's weight": lambda: nn.Linear(300, 500).weight,
    "a convolution's weight": lambda: nn.Conv2d(16, 32, 3).weight,
    "a Linear's bias": lambda: nn.Linear(300, 500).bias,
    "a bias of zeros": lambda: torch.zeros(512),
    "a fresh gain of ones": lambda: torch.ones(128),
    "a trained gain": lambda: 1 + 0.05 * torch.randn(768),
    "post-ReLU activations": lambda: torch.randn(256, 512).relu(),
    "a long ReLU batch": lambda: torch.randn(20_000, 16).relu(),
    "GELU activations": lambda: F.gelu(torch.randn(8, 64, 128)),
    "one-hot targets": lambda: F.one_hot(torch.randint(0, 10, (1000,)), 10).float(),
    "smoothed targets": lambda: F.one_hot(torch.randint(0, 10, (500,)), 10) * 0.9 + 0.01,
    "softmax probabilities": lambda: torch.randn(128, 1000).softmax(1),
    "sharp softmax probabilities": lambda: (torch.randn(128, 1000) * 5).softmax(1),
    "causal attention": lambda: torch.randn(4, 64, 64).masked_fill(torch.ones(64, 64).triu(1).bool(), -1e30).softmax(-1),
    "log-normal gradients": lambda: torch.exp(torch.randn(256, 256) * 2 - 9) * random_signs(256, 256),
    "wider log-normal gradients": lambda: torch.exp(torch.randn(256, 256) * 3 - 12) * random_signs(256, 256),
    "a log-normal vector": lambda: torch.exp(torch.randn(50_000) * 3 - 12) * random_signs(50_000),
    "sparse gradients": lambda: torch.randn(500, 128) * (torch.rand(500, 128) < 0.01) * 1e-3,
    "an embedding's gradient": zipf_gradient,
    "gradients of cross-entropy": lambda: (torch.randn(64, 100).softmax(1) - F.one_hot(torch.randint(0, 100, (64,)), 100)) / 64,
    "LayerNorm outputs": lambda: F.layer_norm(torch.randn(128, 768) * 3 + 1, (768,)),
    "RMSNorm outputs": lambda: F.rms_norm(torch.randn(128, 768), (768,)),
    "BatchNorm outputs": lambda: F.batch_norm(torch.randn(256, 64) * 3 + 5, None, None, training=True),
    "images 0..255": lambda: torch.randint(0, 256, (8, 3, 32, 32)).float(),
    "a picture 0..255": lambda: torch.randint(0, 256, (3, 224, 224)).float(),
    "images 0..1": lambda: torch.rand(8, 3, 32, 32),
    "sinusoidal positions": lambda: torch.sin(torch.arange(512.0)[:, None] * torch.logspace(0, -4, 64)),
    "channels of unlike size": lambda: torch.randn(256, 256) * torch.logspace(-1, 0.5, 256),
    "a massive channel": lambda: torch.randn(256, 1024) * (1 + 300 * F.one_hot(torch.tensor(7), 1024)),
    "a constant massive channel": lambda: torch.randn(60, 1024) + 1000 * F.one_hot(torch.tensor(7), 1024),
    "Student t": lambda: torch.distributions.StudentT(3.0).sample((256, 256)),
    "Adam's second moment": lambda: torch.randn(256, 256).square() * 1e-6,
    "an identity": lambda: torch.eye(64),
    "a loss": lambda: torch.tensor(2.3),
}


@pytest.mark.representative(12)
@pytest.mark.parametrize("target", HALF)
@pytest.mark.parametrize("case", HEALTHY)
def test_healthy_tensors_raise_nothing(case, target):
    assert analyze_tensor(HEALTHY[case](), target).findings == ()


ORDINARY = ["Kaiming weights", "post-ReLU activations", "LayerNorm outputs", "one-hot targets", "images 0..255"]


@pytest.mark.representative(8)
@pytest.mark.parametrize("target", FP8)
@pytest.mark.parametrize("case", ORDINARY)
def test_fp8_is_coarse_but_ordinary_tensors_are_no_alarm(case, target):
    assert codes(analyze_tensor(HEALTHY[case](), target), Severity.WARNING) == set()


def axes(rows=2000):
    return torch.stack([torch.rand(rows) * 2000 - 1000, torch.rand(rows) * 2 - 1], 1)


ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
SICK = {
    "x axis at 1000 times the y axis": (axes, "bf16", "SCALE_IMBALANCE", WARNING),
    "the same in fp16": (axes, "fp16", "SCALE_IMBALANCE", WARNING),
    "the axes as rows": (lambda: axes().t(), "bf16", "SCALE_IMBALANCE", WARNING),
    "two large axes and a small one": (lambda: torch.cat([axes(), axes()[:, :1]], 1), "bf16", "SCALE_IMBALANCE", WARNING),
    "a small variation on a large offset": (lambda: 1000 + torch.randn(256, 64) * 0.01, "bf16", "VARIATION_LOST", ERROR),
    "the same in fp16, narrower": (lambda: 1e4 + torch.randn(256, 64), "fp16", "VARIATION_LOST", ERROR),
    "logits that drifted": (lambda: 300 + torch.randn(128, 100), "bf16", "VARIATION_LOST", ERROR),
    "one row of drifted logits": (lambda: 3000 + torch.randn(1, 1000), "bf16", "VARIATION_LOST", WARNING),
    "a column of timestamps": (
        lambda: torch.cat([1.7e9 + torch.rand(512, 1) * 1e5, torch.randn(512, 2)], 1), "bf16", "VARIATION_LOST", WARNING,
    ),
    "ids in fp16": (lambda: torch.randint(0, 60_000, (4096,)).float(), "fp16", "INTEGERS_ROUNDED", ERROR),
    "ids in bf16": (lambda: torch.randint(0, 60_000, (64, 64)).float(), "bf16", "INTEGERS_ROUNDED", ERROR),
    "positions": (lambda: torch.arange(4096.0), "bf16", "INTEGERS_ROUNDED", ERROR),
    "timesteps": (lambda: torch.arange(1, 1000, 70.0), "bf16", "INTEGERS_ROUNDED", WARNING),
    "a single whole number": (lambda: torch.tensor([999.0]), "bf16", "INTEGERS_ROUNDED", INFO),
    "gradients at 1e-9": (lambda: torch.randn(64, 64) * 1e-9, "fp16", "CAST_FLUSH", ERROR),
    "gradients at 4e-8": (lambda: torch.randn(64, 64) * 4e-8, "fp16", "CAST_FLUSH", WARNING),
    "gradients at 1e-6": (lambda: torch.randn(64, 64) * 1e-6, "fp16", "CAST_SUBNORMAL", WARNING),
    "70000": (lambda: torch.tensor([1.0, 70_000.0]), "fp16", "CAST_OVERFLOW", ERROR),
    "65520": (lambda: torch.tensor([1.0, 65_520.0]), "fp16", "CAST_OVERFLOW", ERROR),
    "minus the largest float": (lambda: torch.full((4, 4), torch.finfo(torch.float32).min), "bf16", "CAST_OVERFLOW", ERROR),
    "500 in e4m3": (lambda: torch.tensor([1.0, 500.0]), "fp8_e4m3", "CAST_OVERFLOW", ERROR),
    "60000": (lambda: torch.tensor([1.5, 60_000.0]), "fp16", "LOW_HEADROOM", WARNING),
    "10000": (lambda: torch.tensor([1.5, 10_000.0]), "fp16", "LOW_HEADROOM", INFO),
    "a sum beyond 65504": (lambda: torch.rand(2000, 8) * 100, "fp16", "REDUCTION_OVERFLOW", WARNING),
    "a norm beyond 65504": (lambda: torch.randn(8, 400) * 9000, "fp16", "REDUCTION_OVERFLOW", WARNING),
    "a count that stops at 256": (lambda: torch.ones(1000, 3), "bf16", "ACCUMULATOR_STALL", INFO),
    "a count that stops at 2048": (lambda: torch.ones(4096), "fp16", "ACCUMULATOR_STALL", INFO),
    "a NaN": (lambda: torch.tensor([1.0, math.nan]), "bf16", "NONFINITE_VALUES", ERROR),
    "an infinity": (lambda: torch.tensor([1.0, math.inf]), "bf16", "NONFINITE_VALUES", ERROR),
    "a mask": (lambda: torch.full((4, 4), -math.inf).triu(1), "fp16", "NONFINITE_VALUES", INFO),
}  # fmt: skip


@pytest.mark.parametrize("case", SICK)
def test_sick_tensors_are_named(case):
    make, target, code, severity = SICK[case]
    found = {f.code: f.severity for f in analyze_tensor(make(), target).findings}
    assert found.get(code) == severity


@pytest.mark.parametrize(
    ("make", "target"),
    [
        (axes, "bf16"),
        (lambda: 1000 + torch.randn(256, 64) * 0.01, "bf16"),
        (lambda: torch.randn(64, 64) * 1e-9, "fp16"),
        (lambda: torch.tensor([1.0, 70_000.0]), "fp16"),
    ],
)
def test_one_fault_gives_one_finding(make, target):
    assert len(analyze_tensor(make(), target).findings) == 1


def test_65519_still_fits_into_fp16():
    assert "CAST_OVERFLOW" not in codes(analyze_tensor(torch.tensor([1.5, 65_519.0]), "fp16"))


def test_the_same_tensors_are_healthy_in_the_format_that_suits_them():
    assert analyze_tensor(torch.randn(64, 64) * 1e-9, "bf16").findings == ()
    assert analyze_tensor(torch.tensor([1.5, 70_000.0]), "bf16").findings == ()
    assert analyze_tensor(10 + torch.randn(256, 64), "fp16").findings == ()


def test_the_hint_names_a_scale_that_works():
    x = torch.randn(64, 64) * 1e-9
    fit = analyze_tensor(x, "fp16").ranges[0]
    for k in (fit.scale_low, fit.scale_high):
        assert not codes(analyze_tensor(x * 2.0**k, "fp16")) & {"CAST_FLUSH", "CAST_OVERFLOW"}
    assert analyze_tensor(x * 2.0 ** (fit.scale_high - 4), "fp16").findings == ()
    assert f"2**{fit.scale_high}" in analyze_tensor(x, "fp16").findings[0].hint


def test_values_that_no_scale_can_save_are_said_to_be_so():
    x = torch.cat([torch.full((100,), 1e-20), torch.tensor([1e6])])
    hint = next(f.hint for f in analyze_tensor(x, "fp16").findings if f.code == "CAST_OVERFLOW")
    assert hint.startswith("no single scale fits")


def test_advice_names_dim_and_the_measured_share():
    x = torch.ones(4, 700)
    advice = [r.advice for r in analyze_tensor(x, "bf16").reductions if r.op == "sum" and r.advice]
    assert len(advice) == 1
    assert advice[0].startswith("sum over dim=1 in FP32: 63.4 % of the mass")  # 1 - 256/700
    assert "torch.sum itself accumulates wider and is" in advice[0]


def test_no_advice_where_nothing_was_lost():
    assert [r.advice for r in analyze_tensor(torch.rand(20, 20), "fp16").reductions] == [""] * 6


def test_only_the_dimensions_asked_for_are_looked_at():
    report = analyze_tensor(torch.randn(4, 5, 6), dims=-1)
    assert [d.dim for d in report.dimensions] == [2]
    assert {r.dim for r in report.reductions} == {2}
    assert [d.dim for d in analyze_tensor(torch.randn(4, 5, 6), dims=(2, 0)).dimensions] == [2, 0]


def test_a_tensor_already_in_the_target_dtype_says_what_can_still_be_said():
    report = analyze_tensor(torch.randn(64, 64).bfloat16(), torch.bfloat16)
    assert report.resolution.same_dtype
    assert report.resolution.rel_l2 == 0
    assert "already bf16: the cast changes nothing" in str(report)


def test_bf16_is_never_praised_for_its_lack_of_underflow():
    text = str(analyze_tensor(torch.randn(64), "bf16"))
    assert "underflow says nothing about it" in text
    row = next(line for line in text.splitlines() if line.strip().startswith("bf16"))
    assert row.split()[1:5] == ["-", "-", "-", "-"]


def test_sqnr_is_only_shown_where_it_means_something():
    x = torch.randn(100, 100)
    assert analyze_tensor(x, "bf16").resolution.sqnr_db is None
    half = analyze_tensor(x, "fp16").resolution
    assert half.sqnr_db == pytest.approx(73.6, abs=0.3)
    assert half.sqnr_db == pytest.approx(half.sqnr_expected_db, abs=0.3)
    assert analyze_tensor(x * 1e-6, "fp16").resolution.sqnr_db < half.sqnr_db - 6


def test_the_target_may_be_a_dtype_or_a_name():
    x = torch.randn(5)
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        assert analyze_tensor(x, dtype) == analyze_tensor(x, format_of(dtype).name)
    assert analyze_tensor(x).target == "bf16"


def test_the_json_survives_a_strict_parser_and_says_the_same():
    report = analyze_tensor(torch.tensor([[1.0, 30_000.0, 40_000.0], [math.inf, 2.0, 65_000.0]]), "fp16")
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["values"]["posinf"] == 1
    assert "Infinity" in [r["library_error"] for r in data["reductions"]]
    assert [f["code"] for f in data["findings"]] == [f.code for f in report.findings]


def test_a_report_is_judged_again_under_other_limits_without_the_tensor():
    report = analyze_tensor(torch.tensor([1.5, 10_000.0]), "fp16")
    assert codes(report) == {"LOW_HEADROOM"}
    assert judge_tensor(report, Limits(headroom_info_bits=2.0)) == ()


def test_the_text_leads_with_the_verdict_and_lists_every_section():
    text = str(analyze_tensor(axes(), tile=16))
    first = text.splitlines()[0]
    assert first == "float32 2000 x 2, risky in bf16: 1 warning"
    for section in ("values", "range", "resolution", "dimensions", "tiles", "reductions", "notes"):
        assert f"\n{section}" in text
    assert "fix: if dim=1 is ever reduced" in text


def test_plain_text_is_ascii_and_no_line_runs_wild():
    report = analyze_tensor(torch.randn(100, 300) * torch.logspace(-4, 0, 300), "fp16", tile=16)
    plain = render_tensor(report, plain=True)
    assert plain.isascii()
    assert "?" not in plain
    assert max(map(len, str(report).splitlines())) <= 140


def test_heat_shows_where_the_loud_ones_are():
    assert heat_line([1.0, 1000.0, 0.0, 1.0]) == "|▁█ ▁|"
    assert heat_line([1.0, 1.01, 0.99]) == "|███|"  # ordinary scatter is no picture
    assert heat_line([0.0, 0.0]) == "(all zero)"
    assert heat_line([1.0, 1000.0], plain=True) == "|.@|"


def test_every_rule_explains_itself():
    for code, (_, page) in PAGES.items():
        assert code.isupper()
        assert "Why:" in page
        assert "Fix:" in page
