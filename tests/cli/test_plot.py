"""`nanny plot`: real pictures of recorded runs, and what must be visible in them."""

from __future__ import annotations

import sys
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from runs.query_recordings import CULPRIT, HEALTHY, SICK, Recipe, record

from nanny.cli import main
from nanny.cli.plot import COLUMNS, QUANTITIES, on_pixels
from nanny.core.examination import Examination, GradientError
from nanny.core.step import GRADIENT_STATS, UPDATE_STATS, RunInfo, Sample, Site
from nanny.runs.matrices import Columns
from nanny.store.writer import RunWriter

RED = (176, 0, 32)


def plot(capsys, db, *argv):
    code = main(["plot", "--db", str(db), *map(str, argv)])
    out = capsys.readouterr()
    return code, out.out.split("\n")[:-1], out.err


def picture(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def red_share_per_column(pixels):
    """Within the picture, not its title or legend: shares of one pixel column."""
    return (np.abs(pixels - RED).max(axis=2) < 12).mean(axis=0)


@pytest.mark.slow
def test_every_picture_of_a_sick_run_is_written_and_named(tmp_path, capsys):
    store = record(tmp_path, SICK)
    code, files, err = plot(capsys, store, "-o", tmp_path / "out")
    assert (code, err) == (0, "")
    assert [f.rpartition("/")[2] for f in files] == ["loss.png", "grad.png", "scale.png", "heat.png", "hist.png"]
    for file in files:
        assert len(np.unique(picture(file)[:, :, 0])) > 20, f"{file} is empty"


def test_the_database_may_stand_before_the_command(tmp_path, capsys):
    store = record(tmp_path, HEALTHY)
    assert main(["--db", str(store), "plot", "-o", str(tmp_path), "--what", "loss"]) == 0
    assert (tmp_path / "loss.png").stat().st_size > 5000


def test_a_picture_that_a_run_has_nothing_for_is_left_out_aloud(tmp_path, capsys):
    code, files, err = plot(capsys, record(tmp_path, HEALTHY), "-o", tmp_path, "--what", "scale,loss")
    assert (code, [f.rpartition("/")[2] for f in files]) == (0, ["loss.png"])
    assert err == "nanny: no picture of scale: the run had no GradScaler\n"


def test_a_run_without_anything_to_draw_is_one_sentence(tmp_path, capsys):
    code, files, err = plot(capsys, record(tmp_path, replace(HEALTHY, steps=0)), "-o", tmp_path)
    assert (code, files) == (2, [])
    assert "has nothing to draw" in err.splitlines()[-1]


@pytest.mark.parametrize("what", ["lossy", "", "loss,heap"])
def test_an_unknown_picture_is_refused_with_the_list(tmp_path, capsys, what):
    code, _, err = plot(capsys, record(tmp_path, HEALTHY), "-o", tmp_path, "--what", what)
    assert code == 2
    assert "name some of loss, grad, scale, heat, hist" in err


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, _, err = plot(capsys, record(tmp_path, HEALTHY), "-o", tmp_path / "file" / "in")
    assert code == 2
    assert "name another folder with -o DIR" in err


@pytest.mark.slow
def test_a_nan_of_one_step_in_hundreds_is_still_red_in_the_heat_map(tmp_path, capsys):
    layers = {f"layer.{i}": (0.0, -8.0) for i in range(2)}
    quiet = Recipe(layers, steps=700, trace_every=1)
    bad = replace(quiet, nan_output=(699, "layer.1"))
    shares = []
    for name, recipe in (("quiet", quiet), ("bad", bad)):
        store = record(tmp_path / name, recipe)
        plot(capsys, store, "-o", tmp_path / name, "--what", "heat")
        shares.append(red_share_per_column(picture(tmp_path / name / "heat.png")).max())
    assert shares[0] == 0.0
    assert shares[1] > 0.1


def test_pooling_keeps_the_worst_of_more_columns_than_pixels():
    steps = np.arange(50_000)
    codes = np.full((1, len(steps)), 100)
    codes[0, 31_337] = 65535
    drawn = on_pixels(codes, Columns(steps, np.arange(len(steps) + 1)).reach, fill=0)
    assert drawn.shape == (1, COLUMNS)
    assert (drawn == 65535).sum() == 1
    assert np.argmax(drawn == 65535) == pytest.approx(COLUMNS * 31_337 / 50_000, abs=1)
    assert (drawn == 100).sum() == COLUMNS - 1


def test_a_stretch_without_samples_stays_empty():
    spans = np.array([[0.0, 10.0], [90.0, 100.0]])
    drawn = on_pixels(np.array([[5, 6]]), spans, fill=0)[0]
    assert set(np.unique(drawn)) == {0, 5, 6}
    assert drawn[COLUMNS // 2] == 0


def test_what_is_not_finite_is_the_darkest_row_in_grey(tmp_path, capsys):
    recipe = Recipe({"small": (-12, -8), "bad": (0, -8), "large": (13, -8), "absent": (0, -8)}, nan_output=(0, "bad"),
                    unmeasured=("absent",), trace_every=1)  # fmt: skip
    plot(capsys, record(tmp_path, recipe), "-o", tmp_path, "--what", "heat")
    grey = np.asarray(Image.open(tmp_path / "heat.png").convert("L")).astype(float)
    width = grey.shape[1]
    middle = grey[:, width // 2 - 40 : width // 2 + 40].mean(axis=1)  # through all four rows of the map
    red = np.flatnonzero(np.abs(picture(tmp_path / "heat.png")[:, width // 2] - RED).max(axis=1) < 12)
    bar = len(red)
    rows = [middle[red[0] + offset * bar + bar // 2] for offset in (-1, 0, 1, 2)]
    small, bad, large, absent = rows
    assert bad < min(small, large, absent) - 30
    assert absent > 200  # hatched on white
    assert abs(small - large) > 60


@pytest.mark.landing
def test_names_that_are_formulas_tags_or_chinese_are_drawn_as_they_are(tmp_path, capsys):
    names = ["$\\frac{1}{", "</text><script>alert(1)</script>", "编码器.层", "x" * 5000, "a&b\"'"]
    store = record(tmp_path, Recipe(dict.fromkeys(names, (0.0, -8.0))))
    code, files, err = plot(capsys, store, "-o", tmp_path, "--format", "svg", "--layer", "$\\frac")
    assert (code, len(files)) == (0, 4)
    assert "scale" in err
    for file in files:
        root = ElementTree.parse(file).getroot()
        assert not [node for node in root.iter() if node.tag.endswith("script")]
    text = " ".join(ElementTree.parse(tmp_path / "heat.svg").getroot().itertext())
    assert "编码器.层" in text
    assert "<script>" in text  # as text


def test_the_histogram_is_of_the_culprit_unless_another_is_named(tmp_path, capsys):
    store = record(tmp_path, SICK)
    plot(capsys, store, "-o", tmp_path, "--format", "svg", "--what", "hist")
    assert f"output of {CULPRIT.site}" in _text(tmp_path / "hist.svg")
    plot(capsys, store, "-o", tmp_path, "--format", "svg", "--what", "hist", "--layer", "stem", "--kind", "output_grad")
    assert "output_grad of stem" in _text(tmp_path / "hist.svg")


@pytest.mark.landing
def test_pictures_name_the_culprit(tmp_path, capsys):
    plot(capsys, record(tmp_path, SICK), "-o", tmp_path, "--format", "svg")
    for name in ("loss", "grad", "scale", "heat", "hist"):
        assert f"NAN_OUTPUT at step {CULPRIT.step} in {CULPRIT.site} (dashed)" in _text(tmp_path / f"{name}.svg")


@pytest.mark.quick(3)
@pytest.mark.parametrize("quantity", ["absmax", "headroom", "flushed", "norm", "lost"])
@pytest.mark.parametrize("kind", ["output", "grad"])
def test_every_quantity_that_is_on_record_can_be_mapped(tmp_path, capsys, quantity, kind):
    options = ("--what", "heat", "--kind", kind, "--quantity", quantity)
    code, files, err = plot(capsys, record(tmp_path, SICK), "-o", tmp_path, *options)
    if (kind, quantity) in (("output", "norm"), ("output", "lost"), ("grad", "lost")):
        assert code == 2
        assert f"{quantity} was not recorded of {kind}" in err
    else:
        assert (code, len(files)) == (0, 1)


@pytest.mark.landing
def test_lost_updates_and_errors_of_examined_steps_can_be_mapped(tmp_path, capsys):
    writer = RunWriter(tmp_path, RunInfo(started=1.0, amp_dtype="bfloat16"))
    writer.add_sites([Site("update", "w", "bfloat16", (8,)), Site("grad", "w", "bfloat16", (8,))])
    writer.add_sample(Sample("update", 5, UPDATE_STATS, np.array([[100], [75], [1e-4], [1]], "<f4").tobytes()))
    writer.add_sample(Sample("grad", 5, GRADIENT_STATS, np.array([[8], [1], [-1], [1]], "<f4").tobytes()))
    gradient = GradientError("w", 1.0, 1.0, error=0.25, energy_share=1.0, zero_share=0.0, reference_zero_share=0.0)
    writer.add_examination(Examination(step=5, gradients=(gradient,)))
    writer.close("finished")
    for quantity, options in (("lost", ("--kind", "update")), ("error", ())):
        out = tmp_path / quantity
        assert plot(capsys, writer.path, "-o", out, "--what", "heat", "--format", "svg", "--quantity", quantity, *options)[0] == 0
        assert f"{QUANTITIES[quantity]}, {'updates' if quantity == 'lost' else 'gradients'}" in _text(out / "heat.svg")


def _text(path):
    return " ".join(ElementTree.parse(path).getroot().itertext())


def test_without_matplotlib_the_command_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("nanny.cli.plot", "nanny.show.plots"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr("nanny.show.plots", raising=False)
    assert main(["plot"]) == 2
    assert capsys.readouterr().err.endswith("install it with pip install 'precision-nanny[plot]'\n")


def test_a_picture_too_large_for_memory_is_refused(tmp_path, capsys):
    store = record(tmp_path, HEALTHY)
    for dots in ("100000", "1"):
        code, _, err = plot(capsys, store, "-o", tmp_path, "--dpi", dots)
        assert code == 2
        assert "up to 1200 will do" in err
