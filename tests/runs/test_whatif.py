"""`nanny whatif`: what it foretells from histograms is what a real cast does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from measure.plain_numbers import range_shares

from nanny import cli
from nanny.core.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, Format
from nanny.core.limits import Limits
from nanny.diagnose.records import Diagnosis
from nanny.diagnose.verdict import Verdict
from nanny.runs.histograms import exponent_below, highest_exponent, shares
from nanny.runs.opening import open_run
from nanny.runs.text.what_if import what_if_headline
from nanny.runs.what_if import RecordedKind, judge_in_format, limit_bits, outcomes_of, quantile, scale_path
from runs import query_recordings as q
from runs.query_recordings import HEALTHY, Recipe, histogram_of, nanny, record

FORMATS = [FP16, BF16, FP8_E4M3, FP8_E5M2]


def whatif(folder: Path, capsys: pytest.CaptureFixture[str], dtype: str = "fp16", *more: str) -> dict[str, Any]:
    assert cli.main(["whatif", "--db", str(folder), "--dtype", dtype, "--format", "json", *more]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def spread(seed: int, bits: float, size: int = 4096) -> np.ndarray:
    """Log-normal values over many orders of magnitude, with some zeros."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=size) * np.exp2(rng.normal(size=size) * bits)
    values[:: size // 16] = 0
    return values.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("target", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("bits", [-30, -16, 0, 12])
def test_shares_agree_with_torch_casts_to_the_width_of_a_bin(target: Format, bits: int) -> None:
    values = spread(1, 6.0)
    found = shares(histogram_of(values)[None], target, bits)
    scaled = torch.tensor(values * 2.0**bits)
    cast = scaled.to(getattr(torch, target.torch_name)).double()
    alive = (scaled != 0).numpy()
    after = np.abs(cast.numpy()[alive])
    magnitude = np.abs(scaled.numpy()[alive])
    top = 2.0 ** (target.max_exponent + 1)
    assert found.flushed[0] == pytest.approx((after == 0).mean(), abs=1e-12)
    assert found.saturated[0] == pytest.approx((magnitude >= top).mean(), abs=1e-12)
    assert found.subnormal[0] == pytest.approx(((after > 0) & (magnitude < target.min_normal)).mean(), abs=1e-12)
    energy = values[alive] ** 2
    lost = energy[after == 0].sum() / energy.sum()
    assert found.flushed_energy[0] == pytest.approx(lost, rel=1.0, abs=1e-12), "true to the width of a bin"


@pytest.mark.parametrize("target", FORMATS, ids=lambda f: f.name)
def test_the_fast_shares_equal_those_of_formats(target: Format) -> None:
    histograms = np.array([histogram_of(spread(seed, 9.0)) for seed in range(5)])
    for bits in (-20, 0, 7):
        fast = shares(histograms, target, bits)
        slow = [range_shares(row, target, 2.0**bits) for row in histograms.tolist()]
        for name in ("count", "zero", "flushed", "subnormal", "saturated"):
            assert getattr(fast, name).tolist() == pytest.approx([getattr(s, name) for s in slow])


def test_the_lowest_exponent_that_must_survive_holds_the_energy_it_promises() -> None:
    values = spread(3, 5.0)
    lowest = int(exponent_below(histogram_of(values)[None], 0.01)[0])
    energy = values**2
    assert energy[np.abs(values) < 2.0**lowest].sum() < 0.02 * energy.sum()
    assert energy[np.abs(values) < 2.0 ** (lowest + 1)].sum() > 0.005 * energy.sum()


def test_the_highest_exponent_is_that_of_the_largest_finite_value() -> None:
    values = np.array([0.1, 3.0, np.inf, np.nan, 0.0])
    assert highest_exponent(histogram_of(values)[None]).tolist() == [1]


@pytest.mark.parametrize("peak", [1e-9, 0.5, 1.0, 3.7, 65503.0, 65519.0, 65520.0, 1e6])
def test_the_largest_scale_that_fits_is_the_last_that_torch_keeps_finite(peak: float) -> None:
    bits = int(limit_bits(np.array([peak]), FP16)[0])
    assert torch.tensor(peak * 2.0**bits).half().isfinite()
    assert not torch.tensor(peak * 2.0 ** (bits + 1)).half().isfinite()


def test_the_scale_path_is_what_gradscaler_does_with_the_same_gradients() -> None:
    rng = np.random.default_rng(5)
    peaks = np.exp2(rng.normal(0, 1.5, 300) - np.linspace(0, 8, 300))
    path = scale_path(dict(enumerate(peaks.tolist())), FP16, Limits())
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**path.best_bits, growth_interval=2000)
    scales = []
    for peak in peaks:
        scaler.scale(weight.sum() * 0)  # starts the scaler
        scales.append(scaler.get_scale())
        weight.grad = (torch.tensor([peak]) * scaler.get_scale()).half().float()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert path.bits.tolist() == [int(np.log2(scale)) for scale in scales]


# verdicts


def test_a_healthy_fp32_run_would_survive_in_fp16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, HEALTHY)
    found = whatif(tmp_path, capsys)
    assert found["survives"] is True
    assert found["with_losses"] is False
    assert found["reasons"] == []


def test_an_output_beyond_65504_ends_the_run_and_no_scale_helps(tmp_path: Path) -> None:
    record(tmp_path / "nanny_logs", replace(HEALTHY, grow={"body.0": 17.0}, steps=60, trace_every=2))
    done = nanny("whatif", "--dtype", "fp16", cwd=tmp_path)
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    assert text.startswith("This FP32 run WOULD NOT SURVIVE in FP16, because:")
    assert "1 output would overflow: body.0 reaches" in text
    assert "no loss scale can help" in text


def test_values_between_65504_and_65520_still_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = q.RunWriter(tmp_path, q.RunInfo(started=0.0))
    writer.add_sites([q.Site("output", "fits", "float32", (4, 4)), q.Site("output", "overflows", "float32", (4, 4))])
    arrays = [np.full(16, 65519.0), np.full(16, 65521.0)]
    writer.add_sample(q.sample_of("output", 0, q.SAMPLE_STATS, arrays, histograms=True))
    writer.close()
    layers = {row["site"]: row["why"] for row in whatif(tmp_path, capsys)["layers"]}
    assert layers == {"fits": "close to overflow", "overflows": "overflows"}


def test_many_flushed_elements_without_energy_are_no_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = spread(7, 14.0, 16384)
    assert (np.abs(values[values != 0]) <= 2.0**-25).mean() > 0.03
    writer = q.RunWriter(tmp_path, q.RunInfo(started=0.0))
    writer.add_sites([q.Site("output", "wide", "float32", values.shape)])
    keep = np.where(np.abs(values) < 2000, values, 0.0)
    writer.add_sample(q.sample_of("output", 0, q.SAMPLE_STATS, [keep], histograms=True))
    writer.close()
    found = whatif(tmp_path, capsys)
    assert found["survives"] is True
    assert found["with_losses"] is False
    assert found["layers"][0]["flushed"] > 0.03


def test_a_branch_that_grows_out_of_zero_is_a_loss_and_one_that_never_does_is_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grows = replace(HEALTHY, layers={"main": (0, -8), "branch": (-40, -8)}, steps=80, trace_every=2, grow={"branch": 38.0})
    record(tmp_path, grows)
    found = whatif(tmp_path, capsys)
    assert (found["survives"], found["with_losses"]) == (True, True)
    record(tmp_path, replace(grows, grow={}))
    assert whatif(tmp_path, capsys)["survives"] is False


def test_a_weight_too_small_for_the_format_is_a_loss_not_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = q.RunWriter(tmp_path, q.RunInfo(started=0.0))
    writer.add_sites([q.Site("weight", "bias", "float32"), q.Site("weight", "kernel", "float32")])
    writer.add_sample(q.sample_of("weight", 0, q.SAMPLE_STATS, [np.full(8, 1e-10), np.full(8, 0.1)], histograms=True))
    writer.close()
    found = whatif(tmp_path, capsys)
    assert (found["survives"], found["with_losses"]) == (True, True)


def test_tiny_gradients_are_saved_by_the_right_scale_and_lost_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, replace(HEALTHY, layers={"a": (0, -38), "b": (1, -36)}))
    best = whatif(tmp_path, capsys)
    assert best["survives"] is True
    assert "init_scale" in " ".join(best["remarks"])
    without = whatif(tmp_path, capsys, "fp16", "--scale", "1")
    assert without["survives"] is False
    assert all("at this loss scale" in reason for reason in without["reasons"])


def test_a_fixed_scale_that_overflows_every_step_is_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, HEALTHY)
    found = whatif(tmp_path, capsys, "fp16", "--scale", str(2.0**40))
    assert found["survives"] is False
    assert "would be skipped" in found["reasons"][0]


def test_gradients_too_far_apart_for_any_scale_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, replace(HEALTHY, layers={"huge": (0, 10), "vanishing": (0, -45)}))
    found = whatif(tmp_path, capsys)
    assert found["survives"] is False
    assert any("vanishing" in reason and "even at the best loss scale" in reason for reason in found["reasons"])


def test_bf16_says_that_underflow_checks_prove_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, replace(HEALTHY, layers={"a": (0, -60), "b": (30, -8)}))
    found = whatif(tmp_path, capsys, "bf16")
    assert found["survives"] is True
    assert "as far as range goes" in found["verdict"]
    remarks = " ".join(found["remarks"])
    assert "pointless" in remarks
    assert "no FP32 copy" in remarks, "updates of 0.1 % are below half a rounding step of bf16"


def test_fp8_is_judged_with_a_scale_for_each_tensor_unless_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, replace(HEALTHY, layers={"a": (12, -20), "b": (-12, -24)}))
    assert whatif(tmp_path, capsys, "fp8_e4m3")["survives"] is True
    assert whatif(tmp_path, capsys, "fp8_e4m3", "--scale", "1")["survives"] is False


def test_what_autocast_left_in_fp32_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = q.RunWriter(tmp_path, q.RunInfo(started=0.0, amp_dtype="bfloat16"))
    writer.add_sites([q.Site("output", "norm", "float32", (4, 4)), q.Site("output", "linear", "bfloat16", (4, 4))])
    writer.add_sample(q.sample_of("output", 0, q.SAMPLE_STATS, [np.full(16, 1e6), np.full(16, 2.0)], histograms=True))
    writer.close()
    found = whatif(tmp_path, capsys)
    assert found["survives"] is True
    assert [row["site"] for row in found["layers"]] == ["linear"]


def test_a_loss_of_one_element_limits_no_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = q.RunWriter(tmp_path, q.RunInfo(started=0.0))
    writer.add_sites([q.Site("output_grad", "criterion", "float32", ()), q.Site("output_grad", "fc", "float32", (16,))])
    writer.add_sample(q.sample_of("output_grad", 0, q.SAMPLE_STATS, [np.ones(1), np.full(16, 1e-7)], histograms=True))
    writer.close()
    assert whatif(tmp_path, capsys)["loss_scale"]["best"] > 2.0**30


def test_a_run_without_traced_steps_is_told_how_to_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = q.RunWriter(tmp_path, q.RunInfo(started=0.0))
    writer.add_sites([q.Site("grad", "w", "float32", (4,))])
    writer.add_sample(q.sample_of("grad", 0, q.GRADIENT_STATS, [np.ones(4)], histograms=False))
    writer.close()
    assert cli.main(["whatif", "--db", str(tmp_path), "--dtype", "fp16"]) == 2
    assert "trace_interval" in capsys.readouterr().err


def test_a_long_run_is_thinned_evenly_and_keeps_its_peak() -> None:
    steps = np.arange(100)
    peaks = np.ones((100, 1))
    peaks[37] = 1e6
    site = q.Site("output", "fc", "float32", (4,))
    recorded = RecordedKind("output", [site], steps, peaks, np.array([4]))
    histograms = [(int(step), histogram_of(np.ones(4))[None]) for step in steps]
    (fate,), stride = outcomes_of(recorded, iter(histograms), FP16, None, Limits(), most_steps=10)
    assert stride == 8
    assert fate.steps == tuple(range(0, 100, 8))
    assert (fate.peak, fate.peak_step, fate.first_overflow, fate.why) == (1e6, 37, 37, "overflows")


class Squares(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


@pytest.mark.parametrize(("size", "breaks"), [(300.0, True), (10.0, False)])
def test_the_verdict_on_a_real_fp32_network_is_what_fp16_does_to_it(
    size: float, breaks: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Squares(), torch.nn.Linear(8, 1))
    data = torch.randn(16, 8) * size
    seen: list[torch.Tensor] = []
    for module in model:
        module.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    model(data)
    outputs = [out.double().numpy() for out in seen]
    writer = q.RunWriter(tmp_path, q.RunInfo(started=0.0))
    writer.add_sites([q.Site("output", str(i), "float32", out.shape) for i, out in enumerate(outputs)])
    writer.add_sample(q.sample_of("output", 0, q.SAMPLE_STATS, outputs, histograms=True))
    writer.close()
    seen.clear()
    model.half()(data.half())
    really_breaks = not all(out.isfinite().all() for out in seen)
    assert really_breaks is breaks
    found = whatif(tmp_path, capsys)
    assert found["survives"] is not really_breaks
    if breaks:
        assert found["layers"][0]["site"] == "1"


def test_300_layers_stay_readable(tmp_path: Path) -> None:
    layers = {f"decoder.blocks.{i}.mlp.projection_out": (0.0, -8.0) for i in range(300)}
    layers["decoder.blocks.123.mlp.projection_out"] = (16.5, -8.0)
    record(tmp_path / "nanny_logs", Recipe(layers=layers, steps=6, trace_every=3))
    lines = nanny("whatif", "--dtype", "fp16", cwd=tmp_path).stdout.splitlines()
    assert len(lines) < 40
    assert max(map(len, lines)) <= 100
    table = next(i for i, line in enumerate(lines) if line.startswith("layer"))
    assert ".123." in lines[table + 1]
    assert any("more tensors, all of which fit" in line for line in lines)


def test_a_run_that_was_never_finite_is_not_told_that_it_survives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, replace(HEALTHY, loss_is_nan_from=0))
    assert cli.main(["whatif", "--db", str(tmp_path), "--dtype", "fp16"]) == 2
    assert "not finite from its first step (0) on" in capsys.readouterr().err


def test_a_run_that_died_is_told_what_happened_and_nothing_behind_it_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, replace(HEALTHY, amp_dtype="float16", loss_is_nan_from=22, grow={"body.0": 17.0}, scale=1024.0))
    own = whatif(tmp_path, capsys)
    assert own["survives"] is False
    assert all(row["peak_step"] < 22 for row in own["layers"])
    assert own["verdict"].startswith("This FP16 run did NOT SURVIVE as it was: its loss is not finite from step 22 on")
    other = whatif(tmp_path, capsys, "bf16")
    assert "whether it would have gone on is not known" in other["verdict"]
    assert other["unknown"] is True
    assert other["with_losses"] is True, "never plain survival of what died"


def test_what_goes_wrong_in_any_format_survives_in_none(tmp_path: Path) -> None:
    cause = Diagnosis("data_nan", culprit="data:input", step=30, confidence=0.95, precision_caused=False)
    with open_run(str(record(tmp_path, replace(HEALTHY, amp_dtype="float16"))), None) as source:
        found = judge_in_format(source, BF16, verdict=Verdict(False, "NOT HEALTHY", "", cause))
    assert (found.survives, found.unknown) == (False, False)
    assert what_if_headline(found).endswith("run stayed within BF16 until then, and would have gone wrong there as well.")


def test_a_very_long_name_does_not_bury_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, Recipe(layers={"x" * 5000: (17.0, 0.0), "y": (17.0, 0.0)}, steps=8, trace_every=4))
    reasons = whatif(tmp_path, capsys)["reasons"]
    assert reasons
    assert max(map(len, reasons)) < 400


@pytest.mark.parametrize("size", [1, 2, 7, 400])
@pytest.mark.parametrize("share", [0.5, 0.75])
def test_the_fast_quantile_is_that_of_numpy(size: int, share: float) -> None:
    values = np.random.default_rng(size).normal(size=size)
    assert quantile(values, share) == pytest.approx(np.quantile(values, share), rel=1e-12)
