"""`nanny compare`: healthy runs do not part, broken ones do, and the first place is named."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanny import cli
from nanny.core.limits import Limits
from nanny.core.numbers import plain_name
from nanny.monitor.watch import MixedPrecisionNanny
from nanny.runs.compare import SeriesPair, _compare_pair, find_divergence, ratio_matrix, step_noise
from nanny.runs.opening import open_named
from runs import query_recordings as q
from runs.query_recordings import Recipe, nanny, record

BASE = Recipe(layers={"stem": (0, -8), "body": (1, -8), "head": (0, -6)}, steps=160, trace_every=4)


def compare(a: object, b: object, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert cli.main(["compare", str(a), str(b), "--format", "json", *more]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def part(a: np.ndarray, b: np.ndarray, tolerance: float = 0.0) -> int:
    noise = np.sqrt(2) * step_noise(a[:, None], Limits())
    found = find_divergence(a[:, None], b[:, None], np.array([[tolerance]]), noise, Limits())
    return int(found.first[0])


# the noise floor


def test_two_noisy_curves_of_the_same_level_do_not_part() -> None:
    apart = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        level = 2 * np.exp(-np.arange(600) / 150)
        apart += part(level + 0.1 * rng.normal(size=600), level + 0.1 * rng.normal(size=600)) >= 0
    assert apart == 0


def test_noise_that_fades_with_the_loss_is_no_parting() -> None:
    apart = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        level = np.exp(-np.arange(400) / 60)
        apart += part(0.5 + level * (1 + 0.1 * rng.normal(size=400)), 0.5 + level * (1 + 0.1 * rng.normal(size=400)), 0.01) >= 0
    assert apart == 0


def test_a_shift_of_three_noise_widths_is_found_where_it_begins() -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        a, b = 0.1 * rng.normal(size=(2, 600))
        b[400:] += 0.3
        assert 396 <= part(a, b) <= 404


def test_a_single_spike_is_not_a_parting() -> None:
    rng = np.random.default_rng(0)
    a = 1 + 0.01 * rng.normal(size=400)
    b = a.copy()
    b[200] += 50
    assert part(a, b, 0.02) == -1


def test_nan_in_one_run_parts_at_once_and_in_both_never() -> None:
    a = np.linspace(2, 1, 50)
    b = a.copy()
    b[30:] = np.nan
    assert part(a, b, 0.01) == 30
    a[30:] = np.nan
    assert part(a, b, 0.01) == -1


def test_a_curve_of_one_step_can_be_compared() -> None:
    assert part(np.array([1.0]), np.array([1.0])) == -1
    assert part(np.array([1.0]), np.array([2.0]), 0.1) == 0


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("module.encoder.0", "encoder.0"),
        ("_orig_mod.module.fc", "fc"),
        ("_forward_module.fc.weight", "fc.weight"),
        ("blocks._fsdp_wrapped_module.0.weight", "blocks.0.weight"),
        ("modules.0", "modules.0"),
        ("my_module.fc", "my_module.fc"),
    ],
)
def test_names_of_wrappers_do_not_stand_between_two_runs(name: str, plain: str) -> None:
    assert plain_name(name) == plain


# recorded runs


def test_the_layer_that_breaks_first_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, BASE)
    record(tmp_path, replace(BASE, amp_dtype="float16", nan_output=(52, "body"), loss_is_nan_from=53))
    found = compare(1, 2, capsys, "--db", str(tmp_path))
    assert (found["first"]["name"], found["first"]["kind"], found["first"]["step"]) == ("body", "output", 52)
    assert found["first"]["broke"] is True
    loss = next(curve for curve in found["curves"] if curve["name"] == "loss")
    assert (loss["step"], loss["b"]) == (53, "NaN")
    assert [row["step"] for row in found["layers"]].count(None) == len(found["layers"]) - 1


def test_a_layer_that_drifts_is_found_although_the_loss_does_not_show_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, BASE)
    record(tmp_path, replace(BASE, amp_dtype="bfloat16", grow={"head": 5.0}))
    found = compare(1, 2, capsys, "--db", str(tmp_path))
    assert found["first"]["name"] == "head"
    assert found["same_start"] is True
    assert all(curve["step"] is None for curve in found["curves"])
    assert found["layers"][0]["last_ratio"] > 8


def test_the_same_run_with_another_seed_does_not_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, BASE)
    record(tmp_path, replace(BASE, seed=11))
    found = compare(1, 2, capsys, "--db", str(tmp_path))
    assert found["parts"] is False


def test_runs_in_different_files_are_named_by_path_and_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = record(tmp_path / "fp32", BASE)
    two = record(tmp_path / "fp16", BASE)
    record(tmp_path / "fp16", replace(BASE, loss_is_nan_from=20))
    assert compare(one, f"{two}:1", capsys)["parts"] is False
    assert compare(tmp_path / "fp32", two, capsys)["first"]["step"] == 20


def test_the_text_says_where_and_what_to_type(tmp_path: Path) -> None:
    record(tmp_path / "nanny_logs", BASE)
    record(tmp_path / "nanny_logs", replace(BASE, amp_dtype="float16", nan_output=(52, "body")))
    done = nanny("compare", 1, 2, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("The runs PART FIRST at step 52: the output of body is not finite in B")
    assert "next: nanny layer body --run 1" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_another_learning_rate_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rate in (1e-3, 2e-3):
        writer = q.RunWriter(tmp_path, q.RunInfo(time.time()))
        for step in range(5):
            writer.add_scalars(step, {"loss": 1.0, "lr": rate})
        writer.close()
    notes = compare(1, 2, capsys, "--db", str(tmp_path))["notes"]
    assert any("learning rates differ from step 0" in note for note in notes)


def test_runs_without_a_common_step_get_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for start in (0, 100):
        writer = q.RunWriter(tmp_path, q.RunInfo(time.time()))
        for step in range(start, start + 5):
            writer.add_scalars(step, {"loss": 1.0})
        writer.close()
    assert cli.main(["compare", "1", "2", "--db", str(tmp_path)]) == 2
    assert "no step in common" in capsys.readouterr().err


# real training


def train(folder: Path, *, dtype: torch.dtype | None = None, pure: bool = False, steps: int = 240) -> None:
    """A small classifier under autocast, or with its weights kept in the narrow format."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    teacher = torch.randn(16, 4, generator=torch.Generator().manual_seed(99))
    batches = torch.Generator().manual_seed(1)
    if pure:
        model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    name = str(dtype).removeprefix("torch.") if dtype else ""
    writer = q.RunWriter(folder, q.RunInfo(time.time(), amp_dtype=name))
    parameters = list(model.named_parameters())
    writer.add_sites([q.Site("grad", n, "float32", tuple(p.shape)) for n, p in parameters])
    for step in range(steps):
        x = torch.randn(32, 16, generator=batches)
        with torch.autocast("cpu", dtype, enabled=dtype is not None and not pure):
            out = model(x.to(dtype) if pure and dtype else x)
        loss = torch.nn.functional.cross_entropy(out.float(), (x @ teacher).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        grads = [p.grad.double().numpy() for _, p in parameters if p.grad is not None]
        writer.add_sample(q.sample_of("grad", step, q.GRADIENT_STATS, grads, histograms=False))
        norm = float(np.sqrt(sum((g**2).sum() for g in grads)))
        writer.add_scalars(step, {"loss": loss.item(), "grad_norm": norm, "lr": 0.02})
        optimizer.step()
    writer.close()


@pytest.mark.landing
def test_real_bf16_autocast_stays_with_fp32_and_weights_kept_in_bf16_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path)
    train(tmp_path, dtype=torch.bfloat16)
    train(tmp_path, dtype=torch.bfloat16, pure=True)
    healthy = compare(1, 2, capsys, "--db", str(tmp_path))
    assert healthy["same_start"] is True
    assert healthy["parts"] is False, healthy["first"]
    swallowed = compare(1, 3, capsys, "--db", str(tmp_path))
    assert swallowed["same_start"] is True
    assert swallowed["parts"] is True


def test_a_reference_that_broke_is_said_to_have_broken_and_not_to_be_met_again(tmp_path: Path, capsys: Any) -> None:
    store = record(tmp_path, replace(BASE, loss_is_nan_from=80))
    record(tmp_path, replace(BASE, final_loss=0.1))
    found = compare(1, 2, capsys, "--db", str(store))
    (loss,) = [curve for curve in found["curves"] if curve["name"] == "loss"]
    assert loss["still_apart"]
    assert any("the loss of A, the reference, is not finite from step 80 on" in note for note in found["notes"])


def test_the_map_of_ratios_has_the_layers_of_the_run_and_its_distance_from_the_reference(tmp_path: Path) -> None:
    store = record(tmp_path, BASE)
    louder = {name: (low + 3, high) for name, (low, high) in BASE.layers.items()}
    record(tmp_path, replace(BASE, layers=louder, nan_output=(40, "body")))
    with open_named("1", str(store)) as a, open_named("2", str(store)) as b:
        ratio = ratio_matrix(a[0], b[0], "output")
        assert ratio is not None
        sizes = ratio.keys
        assert sizes.shape == (3, len(ratio.columns.steps))
        broke = ratio.columns.steps.tolist().index(40)
        assert np.isposinf(sizes[1, broke]), "B alone is not finite there"
        finite = sizes[:, :broke]
        assert np.all((finite > 4) & (finite < 16)), "three binary orders louder"
        assert ratio_matrix(a[0], b[0], "no such kind") is None


def test_the_ratio_that_is_told_is_the_one_of_the_numbers_beside_it(tmp_path: Path) -> None:
    """Medians of each run alone have another ratio than the median ratio: 44 % beside 0.00232 and 0.00297 is no arithmetic."""
    draw = np.random.default_rng(0)
    steps = np.arange(200)
    own = np.exp(draw.normal(0, 1, 200))
    other = own * np.where(steps < 60, 1.0, 3.0) * np.exp(draw.normal(0, 0.2, 200))
    pair = SeriesPair("grad", [("w", 0)], steps, own[:, None], other[:, None], np.array([0.05]), log=True)
    (series,) = _compare_pair(pair, Limits(), "gap")
    assert series.step is not None
    assert series.ratio == pytest.approx(series.b / series.a)
    assert series.ratio == pytest.approx(3, rel=0.3)


def test_a_scaler_that_finds_its_scale_is_no_parting_and_one_that_never_does_is(tmp_path: Path, capsys: Any) -> None:
    def train(init_scale: float, steps: int) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        draw = torch.Generator().manual_seed(0)
        with MixedPrecisionNanny(model, optimizer, scaler, output_dir=tmp_path, live=False, trace_interval=5) as nanny:
            for step in range(steps):
                x = torch.randn(32, 8, generator=draw)
                with nanny.step(step):
                    optimizer.zero_grad()
                    with torch.autocast("cpu", torch.float16):
                        loss = torch.nn.functional.mse_loss(model(x).float(), x.sum(1, keepdim=True).tanh())
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()

    train(2.0**10, 100)
    train(2.0**26, 100)
    found = compare("1", "2", capsys, "--db", str(tmp_path))
    assert not any(series["broke"] for series in (*found["curves"], *found["layers"]))
    assert not any(series["still_apart"] for series in found["curves"])
    train(2.0**100, 20)
    found = compare("1", "3", capsys, "--db", str(tmp_path))
    assert any(series["broke"] and series["step"] == 0 for series in found["layers"])
