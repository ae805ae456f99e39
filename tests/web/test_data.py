"""What the page gets of a run: nothing bad is pooled away, everything is bounded."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs.query_recordings import HEALTHY, SICK, Recipe, many_layers, record

from nanny.core.examination import Examination, GradientError
from nanny.core.finding import Finding, Severity
from nanny.core.formats import FP16
from nanny.core.step import GRADIENT_STATS, SAMPLE_STATS, UPDATE_STATS, RunInfo, Sample, Site
from nanny.monitor.watch import MixedPrecisionNanny
from nanny.runs.matrices import Columns, groups_of, order_keys, worst_of
from nanny.show import figures
from nanny.show.html import json_for_script
from nanny.store import reader
from nanny.store.writer import RunWriter
from nanny.web.arrays import INFINITE, NAN, NOT_SAMPLED, ZERO, codes_of, kept_points, pack_array
from nanny.web.data import changes_since, layer_data, page_data, whatif_data
from nanny.web.figures import format_borders
from nanny.web.page import page_words, render, scripts
from web.unpacking import unpack_array, value_of

MAGNITUDES = st.floats(width=32, allow_nan=True, allow_infinity=True).map(abs)


@given(st.lists(MAGNITUDES, min_size=1, max_size=20), st.lists(st.booleans(), min_size=20, max_size=20))
def test_codes_keep_the_order_from_not_sampled_to_nan(values, seen):
    keys = order_keys(np.array(values, np.float32), np.array(seen[: len(values)]))
    order = np.argsort(keys, kind="stable")
    codes = codes_of(keys)
    assert (np.diff(codes[order].astype(int)) >= 0).all()
    for value, measured, code in zip(values, seen, codes.tolist()):
        if not measured:
            assert code == NOT_SAMPLED
        elif math.isnan(value):
            assert code == NAN
        elif value == 0:
            assert code == ZERO
        elif value < 1e38:
            assert value_of(code) == pytest.approx(value, rel=0.003)


def test_an_infinity_is_neither_nan_nor_a_number():
    assert codes_of(order_keys(np.array([-np.inf]), np.array([True]))).tolist() == [INFINITE]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "float32", "float64"])
def test_arrays_survive_packing(dtype):
    array = (np.arange(60).reshape(3, 20) * 37 % 251).astype(dtype)
    assert (unpack_array(pack_array(array)) == array).all()
    assert unpack_array(pack_array(array)).dtype == np.dtype(dtype)


@given(st.integers(1, 500), st.integers(1, 40))
def test_groups_cover_all_samples_once(samples, most):
    bounds = groups_of(samples, most)
    assert bounds[0] == 0
    assert bounds[-1] == samples
    assert (np.diff(bounds) > 0).all()
    assert len(bounds) - 1 <= most


@given(st.lists(st.lists(MAGNITUDES, min_size=3, max_size=3), min_size=1, max_size=12))
def test_of_each_group_the_worst_value_wins_and_its_place_is_known(rows):
    block = order_keys(np.array(rows, np.float32), np.ones((len(rows), 3), bool))
    keys, at = worst_of(block)
    for site in range(3):
        column = [float(key) for key in block[:, site]]
        assert float(keys[site]) == max(column)
        assert column[int(at[site])] == max(column)


def test_a_column_starts_at_its_step_and_goes_on_to_the_next_at_most():
    edges = Columns(np.array([0, 10, 500]), np.arange(4)).reach
    assert edges.tolist() == [[-0.5, 9.5], [9.5, 499.5], [499.5, 989.5]]


def test_a_column_is_drawn_over_its_own_steps_and_not_over_those_that_nobody_looked_at():
    columns = Columns(np.array([0, 1, 20, 500]), np.array([0, 2, 3, 4]), bad=np.array([503]))
    assert columns.drawn(least=1).tolist() == [[-0.5, 1.5], [19.5, 20.5], [499.5, 500.5]]
    assert columns.drawn(least=30).tolist() == [[-0.5, 19.5], [19.5, 49.5], [499.5, 502.5]]


def test_a_sample_is_not_drawn_over_steps_whose_loss_was_lost():
    edges = Columns(np.array([0, 10, 20, 30]), np.arange(5), bad=np.array([13, 14, 30, 31])).reach
    assert edges[:, 1].tolist() == [9.5, 12.5, 29.5, 30.5], "nor one of a lost step over those behind it"


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=300), st.integers(1, 20))
def test_thinned_curves_keep_their_extremes_their_ends_and_their_first_nan(values, groups):
    array = np.array(values)
    kept = array[kept_points(array, groups)]
    finite = array[np.isfinite(array)]
    assert kept[0] == array[0] or math.isnan(array[0])
    assert kept[-1] == array[-1] or math.isnan(array[-1])
    assert len(kept) <= max(4 * groups + 1, 2 * groups)
    if len(finite):
        assert {finite.min(), finite.max()} <= set(kept.tolist())
    if len(finite) < len(array):
        first = int(np.argmin(np.isfinite(array)))
        assert first in kept_points(array, groups)


def test_one_bad_step_of_a_long_run_stays_in_the_picture_with_its_step(tmp_path):
    writer = RunWriter(tmp_path, RunInfo(started=time.time(), torch="2.13.0"))
    names = ["a", "b", "c"]
    writer.add_sites([Site("grad", name, "float32", (4,)) for name in names])
    for step in range(5000):
        peak = np.array([1.0, 2.0, np.inf if step == 3333 else 3.0], "<f4")
        data = np.stack([np.full(3, 4, "<f4"), peak, -peak, peak])
        writer.add_sample(Sample("grad", step, GRADIENT_STATS, data.astype("<f4").tobytes()))
    writer.close("finished")
    kind = page_data(writer.path)["kinds"]["grad"]
    codes, at = (unpack_array(kind["quantities"]["absmax"][name]) for name in ("codes", "at"))
    assert codes.shape[1] <= 1000
    (row,), (column,) = np.nonzero(codes == INFINITE)
    assert row == 2
    assert unpack_array(kind["steps"])[unpack_array(kind["bounds"])[column] + at[row, column]] == 3333


def test_not_sampled_zero_and_non_finite_are_three_codes(tmp_path):
    writer = RunWriter(tmp_path, RunInfo(started=time.time()))
    writer.add_sites([Site("output", name, "float16", (4,)) for name in ("absent", "zero", "nan", "fine")])
    low = np.array([0, 0, np.nan, -2], "<f4")
    rows = {"count": [0, 4, 4, 4], "min": low, "max": -low, "norm": -low}
    data = np.stack([np.array(rows.get(name, [0, 0, 0, 0]), "<f4") for name in SAMPLE_STATS])
    writer.add_sample(Sample("output", 0, SAMPLE_STATS, data.tobytes()))
    writer.close("finished")
    codes = unpack_array(page_data(writer.path)["kinds"]["output"]["quantities"]["absmax"]["codes"])[:, 0]
    assert codes[:3].tolist() == [NOT_SAMPLED, ZERO, NAN]
    assert value_of(int(codes[3])) == pytest.approx(2.0, rel=0.003)


def masked_run(folder: Path, with_weights: bool) -> Path:
    writer = RunWriter(folder, RunInfo(started=time.time()))
    writer.add_sites([Site("output", "mask", "float16", (4,))])
    if with_weights:
        writer.add_sites([Site("weight", "mask.weight", "float32", (4,))])
    rows = {"count": 4, "min": -np.inf, "max": 7.0, "neginf": 2}
    data = np.array([[rows.get(name, 0)] for name in SAMPLE_STATS], "<f4")
    writer.add_sample(Sample("output", 0, SAMPLE_STATS, data.tobytes()))
    writer.close("finished")
    return writer.path


def test_minus_infinity_of_a_mask_is_no_alarm_but_of_a_layer_with_weights_it_is(tmp_path):
    def code(path: Path) -> int:
        return int(unpack_array(page_data(path)["kinds"]["output"]["quantities"]["absmax"]["codes"])[0, 0])

    assert value_of(code(masked_run(tmp_path / "mask", with_weights=False))) == pytest.approx(7.0, rel=0.003)
    assert code(masked_run(tmp_path / "layer", with_weights=True)) == INFINITE


def test_the_share_that_fp16_flushes_follows_the_loss_scale(tmp_path):
    small = {"layer": (0.0, -30.0)}  # below FP16's smallest, unless scaled by 2**16
    lost = {}
    for scale in (1.0, 65536.0):
        path = record(tmp_path / str(scale), Recipe(layers=small, scale=scale))
        codes = unpack_array(page_data(path)["kinds"]["grad"]["quantities"]["flushed"]["codes"])
        lost[scale] = max(value_of(int(code)) or 0.0 for code in codes.ravel())
    assert lost[1.0] > 0.9
    assert lost[65536.0] < 0.01


def test_histograms_hold_the_recorded_shares(tmp_path):
    path = record(tmp_path, HEALTHY)
    kind = page_data(path)["histograms"]["output"]
    shares = unpack_array(kind["shares"]).astype(float)
    parts = np.where(shares > 0, 2.0 ** ((shares - 255) / 18), 0).sum(-1)
    assert parts == pytest.approx(1.0, abs=0.04)
    alone = layer_data(path, 1, "output", "body.0")
    assert alone is not None
    row = unpack_array(alone["shares"])[0].astype(float)
    assert np.where(row > 0, 2.0 ** ((row - 255) / 18), 0).sum(-1) == pytest.approx(1.0, abs=0.04)
    assert layer_data(path, 1, "output", "no such layer") is None


class Square(torch.nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * h


def test_a_real_run_that_overflows_comes_with_its_diagnosis_in_both_languages(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Square(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with MixedPrecisionNanny(model, optimizer, trace_interval=1, output_dir=tmp_path, live=False, strict=True) as watcher:
        for step in range(4):
            with watcher.step(step), torch.autocast("cpu", torch.float16):
                optimizer.zero_grad()
                model(torch.full((2, 4), 100.0 * 4**step)).float().mean().backward()
                optimizer.step()
    data = page_data(tmp_path)
    assert data["verdict"]["word"] == "NOT HEALTHY"
    first = data["diagnoses"][0]
    assert first["remedy"]
    assert first["culprit"].startswith("1")
    assert first["pages"]["en"]["title"] != first["pages"]["zh"]["title"]


def test_a_page_opens_each_store_once(tmp_path, monkeypatch):
    record(tmp_path, dataclasses.replace(HEALTHY, started=1.7e9, world_size=2))
    record(tmp_path, dataclasses.replace(HEALTHY, started=1.8e9, world_size=2, seed=1))
    record(tmp_path, dataclasses.replace(SICK, started=1.8e9, world_size=2, rank=1))
    opened = []
    connect = reader.connect
    monkeypatch.setattr(reader, "connect", lambda path: opened.append(Path(path).name) or connect(path))
    data = page_data(tmp_path, 2, "1")
    assert data["run"]["rank"] == 1
    assert data["comparison"]["other"]["id"] == 1
    assert sorted(opened) == ["metrics.db", "metrics.rank1.db"]


def test_a_real_run_shows_which_parameters_lose_their_updates(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    with MixedPrecisionNanny(model, optimizer, trace_interval=2, output_dir=tmp_path, live=False, strict=True) as watcher:
        for step in range(6):
            with watcher.step(step):
                optimizer.zero_grad()
                model(torch.randn(8, 16, dtype=torch.bfloat16)).float().square().mean().backward()
                optimizer.step()
    kind = page_data(tmp_path)["kinds"]["update"]
    codes = unpack_array(kind["quantities"]["lost"]["codes"])
    assert value_of(int(codes[kind["names"].index("weight"), 0])) == pytest.approx(1.0, abs=0.05)


def test_lost_updates_and_gradient_errors_have_their_matrices(tmp_path):
    writer = RunWriter(tmp_path, RunInfo(started=time.time(), amp_dtype="bfloat16"))
    writer.add_sites([Site("update", "w", "bfloat16", (8,)), Site("grad", "w", "bfloat16", (8,))])
    writer.add_sample(Sample("update", 5, UPDATE_STATS, np.array([[100], [75], [1e-4], [1]], "<f4").tobytes()))
    writer.add_sample(Sample("grad", 5, GRADIENT_STATS, np.array([[8], [1], [-1], [1]], "<f4").tobytes()))
    gradient = GradientError("w", 1.0, 1.0, error=0.25, energy_share=1.0, zero_share=0.0, reference_zero_share=0.0)
    writer.add_examination(Examination(step=5, gradients=(gradient,)))
    writer.close("finished")
    kinds = page_data(writer.path)["kinds"]
    lost = unpack_array(kinds["update"]["quantities"]["lost"]["codes"])
    error = kinds["grad"]["quantities"]["error"]
    assert value_of(int(lost[0, 0])) == pytest.approx(0.75, rel=0.003)
    assert value_of(int(unpack_array(error["codes"])[0, 0])) == pytest.approx(0.25, rel=0.003)
    assert unpack_array(error["steps"]).tolist() == [5]


def test_changes_carry_the_same_numbers_as_the_whole_page(tmp_path):
    path = record(tmp_path, SICK)
    whole, news = page_data(path), changes_since(path, 1, 19)
    curve, new = whole["curves"]["loss"], news["curves"]["loss"]
    after = unpack_array(curve["steps"]) > 19
    assert unpack_array(new["steps"]).tolist() == unpack_array(curve["steps"])[after].tolist()
    kind, fresh = whole["kinds"]["grad"], news["kinds"]["grad"]
    wanted = unpack_array(kind["quantities"]["norm"]["codes"])[:, unpack_array(kind["steps"]) > 19]
    assert (unpack_array(fresh["quantities"]["norm"]["codes"]) == wanted).all()
    assert [f["code"] for f in news["findings"]] == [f["code"] for f in whole["findings"]]
    assert changes_since(path, 1, 39)["kinds"] == {}


@pytest.mark.landing
def test_changes_of_a_large_model_stay_below_100_kilobytes_or_ask_for_the_whole_page(tmp_path):
    path = record(tmp_path, Recipe(layers=many_layers(400), steps=30, trace_every=3, amp_dtype="float16", scale=1024.0))
    sizes = [len(json.dumps(changes_since(path, 1, step))) for step in (-1, 10, 28)]
    assert max(sizes) < 100_000
    assert "kinds" in changes_since(path, 1, 28)


def test_the_page_shows_the_rank_that_the_culprit_was_seen_on(tmp_path):
    record(tmp_path, dataclasses.replace(HEALTHY, world_size=2))
    record(tmp_path, dataclasses.replace(SICK, rank=1, world_size=2))
    whole, news = page_data(tmp_path, 1), changes_since(tmp_path, 1, 5)
    assert (whole["verdict"]["culprit"][3], whole["run"]["rank"], news["run"]["rank"]) == (1, 1, 1)
    assert whole["run"]["file"].endswith("metrics.rank1.db")
    alone = page_data(tmp_path / "metrics.rank1.db")
    assert whole["curves"] == alone["curves"]
    assert whole["whatif"] == whatif_data(tmp_path, 1) == whatif_data(tmp_path / "metrics.rank1.db", 1)
    kind, name = "output", alone["kinds"]["output"]["names"][0]
    assert layer_data(tmp_path, 1, kind, name) == layer_data(tmp_path / "metrics.rank1.db", 1, kind, name)


def test_a_name_that_turns_the_direction_of_writing_does_not_turn_the_sentence(tmp_path):
    name = "layer\u202eeno"
    message = f"`{name}` is NaN"
    findings = (Finding("NAN", Severity.ERROR, message, site=name, step=3, hint=f"mend `{name}`"),)
    page = page_data(record(tmp_path, Recipe(layers={name: (17.0, 0.0)}, steps=8, trace_every=4, findings=findings)))
    said = [page["findings"][0]["message"], page["findings"][0]["hint"], *page["whatif"]["formats"][0]["reasons"]]
    assert len(said) >= 3
    assert not [text for text in said if "\u202e" in text]
    assert page["findings"][0]["site"] == name, "names are keys, and stay"


def test_a_job_without_a_culprit_is_shown_by_its_first_rank(tmp_path):
    for rank in (0, 1):
        record(tmp_path, dataclasses.replace(HEALTHY, rank=rank, world_size=2))
    assert page_data(tmp_path, 1, live=True)["run"]["rank"] == 0


@pytest.mark.landing
def test_a_flood_of_findings_is_cut_but_not_its_errors(tmp_path):
    flood = [Finding("SCALE_LOW", Severity.INFO, "low " * 2000, site=f"s{i}", step=i) for i in range(1500)]
    path = record(tmp_path, dataclasses.replace(HEALTHY, findings=(*flood, *SICK.findings)))
    data = page_data(path)
    assert data["findings_left_out"] == 1503 - len(data["findings"])
    assert sum(f["severity"] == "error" for f in data["findings"]) == 2
    assert max(len(f["message"]) for f in data["findings"]) <= 2000


def test_borders_are_where_casts_really_end():
    fp16 = next(border for border in format_borders() if border["name"] == "fp16")
    with np.errstate(over="ignore"):
        assert np.isinf(np.float16(2.0 ** fp16["top"]))
        assert np.isfinite(np.float16(2.0 ** fp16["top"] * 0.999))
        assert np.float16(2.0 ** fp16["flush"]) == 0
        assert np.float16(2.0 ** fp16["flush"] * 1.01) > 0
    assert 2.0 ** fp16["normal"] == FP16.min_normal


# What colours become for eyes without one kind of cone (Machado, Oliveira, Fernandes 2009), in linear RGB.
EYES = {
    "usual": np.eye(3),
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def seen(colour: str, eyes: str) -> np.ndarray:
    """CIE Lab of a colour as these eyes see it; 10 apart is told apart at a glance."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(np.array(EYES[eyes]) @ linear, 0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eyes", EYES)
def test_zero_and_non_finite_stand_apart_from_every_value_for_all_eyes(eyes):
    values = [seen(colour, eyes) for colour in figures.VIRIDIS]
    special = {name: seen(colour, eyes) for name, colour in (("zero", figures.ZERO), ("bad", figures.BAD))}
    for colour in special.values():
        assert min(float(np.linalg.norm(colour - value)) for value in values) > 20
    assert np.linalg.norm(special["zero"] - special["bad"]) > 20
    assert (np.diff([value[0] for value in values]) > 0).all()  # and in grey, more is lighter


def test_no_name_can_end_the_script_it_stands_in():
    text = json_for_script({"name": "</script><!--", "value": math.nan})
    assert "<" not in text
    assert json.loads(text) == {"name": "</script><!--", "value": "NaN"}


def test_all_that_the_script_says_is_there_in_both_languages():
    script = scripts()
    asked = set(re.findall(r'\bt\("([^"]+)"', script))
    assert len(asked) > 40
    for language in page_words().values():
        assert asked <= set(language)


def test_the_page_holds_plotly_and_its_own_files(tmp_path):
    text = render(page_data(record(tmp_path, HEALTHY)), live=False, lang=None)
    packed_plotly = text.partition('id="plotly">')[2].partition("<")[0]
    assert b"plotly.js v" in zlib.decompress(base64.b64decode(packed_plotly))[:200]
    assert "{{" not in text.partition("</style>")[0]


def test_making_a_page_needs_no_torch(tmp_path):
    record(tmp_path, SICK)
    program = (
        "import sys; from nanny.web.report import main;"
        f"main(['--db', {str(tmp_path)!r}, '-o', {str(tmp_path / 'r.html')!r}]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0
