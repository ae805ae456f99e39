"""The picture of a run: what is drawn stands where it happened."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from nanny.runs.wall import Limit, Wall
from nanny.show.wall import wall_svg

WORDS: dict[str, Any] = {"word": "NOT HEALTHY", "good": False, "title": "t", "subtitle": "s", "footer": "f"}
LOSSLESS = Wall(
    "fp16", 65504.0, site="a", kind="output", lowest=0, steps=(0, 10), limits=[Limit(0, 65504.0, 2.0**-24)],
    reach=[(-0.5, 0.5), (9.5, 10.5)], counts=[[4], [4]], zeros=[0, 0], nonfinite=[0, 0],
)  # fmt: skip


def drawn(wall: Wall) -> str:
    return wall_svg(wall, source="", change="", chain=(), lang="en", **WORDS)


def boxes(svg: str, style: str) -> list[tuple[float, float]]:
    """Left and right of each."""
    (path,) = re.findall(rf'<path class="{style}"[^>]* d="([^"]+)"', svg)
    return [(float(a), float(b)) for a, b in re.findall(r"M([\d.]+) [\d.]+H([\d.]+)", path)]


def place_of(svg: str, text: str) -> tuple[float, float]:
    x, y = re.search(rf'x="([\d.]+)" y="([\d.]+)"[^>]*>{re.escape(text)}<', svg).groups()  # type: ignore[union-attr]
    return float(x), float(y)


def test_a_sample_stands_over_the_number_of_its_step():
    svg = drawn(LOSSLESS)
    for (left, right), step in zip(boxes(svg, "cell"), ("0", "10")):
        if step == "0":
            assert (left + right) / 2 == pytest.approx(place_of(svg, step)[0], abs=0.2)
        assert right - left < 20, "the stretch to the next sample was not looked at"


def test_the_end_of_the_format_moves_with_the_loss_scale():
    limits = [Limit(0, 65504.0 / 2**4, 2.0**-28), Limit(6, 65504.0 / 2**2, 2.0**-26)]
    svg = drawn(replace(LOSSLESS, kind="grad", limits=limits))
    (points,) = re.findall(r'<path class="wall" fill="none" d="M([^"]+)"', svg)
    heights = [float(point.split()[1]) for point in points.split("L")]
    assert len(set(heights)) == 2
    assert heights == sorted(heights, reverse=True), "a smaller scale leaves more room"
    assert "fp16 ends at 16,376 at this loss scale" in svg


@pytest.mark.parametrize("words", [3, 30])
def test_a_long_title_stays_readable_and_inside(words):
    svg = wall_svg(LOSSLESS, **(WORDS | {"title": "lorem ipsum " * words}))
    sizes = [int(size) for size in re.findall(r'class="ink" x="[\d.]+" y="[\d.]+" font-size="(\d+)" font-weight="700"', svg)]
    assert min(sizes[:2]) >= 18


def test_updates_below_half_a_spacing_are_drawn_below_its_line():
    limits = [Limit(0, 3.39e38, 2.0**-11)]
    wall = Wall("bf16", 3.39e38, site="0.weight", kind="weight", steps=(0, 10), impact=8, limits=limits, lowest=-4,
                reach=[(-0.5, 0.5)], counts=[[9]], zeros=[0], nonfinite=[0], marks=[(0, 2e-5), (8, 1.5e-5)])  # fmt: skip
    svg = drawn(wall)
    line = float(re.search(r'<line class="wall" [^>]*y1="([\d.]+)"', svg).group(1))  # type: ignore[union-attr]
    (marks,) = re.findall(r'<path class="ghost" d="([^"]+)"', svg)
    heights = [float(y) for y in re.findall(r"M[\d.]+ ([\d.]+)L", marks)]
    assert len(heights) == 2
    assert min(heights) > line
    assert "updates of 1.5e-5" in svg
    assert "updates of 2e-5" in drawn(replace(wall, impact=0)), "the number is that of the verdict's own step"
    assert "below half a spacing of bf16, 0.000488, a step moves nothing" in svg


def test_what_fp32_has_stands_beside_gradients_that_are_all_zero():
    zeros = replace(LOSSLESS, kind="grad", impact=0, counts=[[0], [0]], zeros=[9, 9], marks=[(0, 2.0**-23), (4, 2.0**-23)])
    svg = drawn(zeros)
    line = float(re.search(r'<line class="wall" [^>]*y1="([\d.]+)"', svg).group(1))  # type: ignore[union-attr]
    (marks,) = re.findall(r'<path class="ghost" d="([^"]+)"', svg)
    assert [float(y) < line for y in re.findall(r"M[\d.]+ ([\d.]+)L", marks)] == [True, True]
    assert "in FP32 1.19e-7 (rms)" in svg
    assert "fp16 begins at 5.96e-8" in svg
    assert "every value here is exactly 0" in svg


def test_steps_whose_loss_was_lost_are_shaded_whole_and_named():
    svg = drawn(replace(LOSSLESS, lost=[3, 4, 5, 8, 60]))
    (first, second) = boxes(svg, "bad")
    at = [place_of(svg, str(step))[0] for step in (2, 4, 6, 8)]
    assert at[0] < first[0] < at[1] < first[1] < at[2] < second[0] < at[3] < second[1]
    assert "loss not finite" in svg
    assert "loss not finite" not in drawn(LOSSLESS)


@pytest.mark.parametrize("impact", [1, 9])
def test_the_end_of_the_format_and_what_fp32_has_are_not_written_over_each_other(impact):
    svg = drawn(replace(LOSSLESS, impact=impact, expected=65870.0, limits=[Limit(0, 65504.0, 2.0**-24)]))
    end, has = place_of(svg, "fp16 ends at 65,504")[0], place_of(svg, "FP32 has 65,870")[0]
    assert abs(end - has) > 300


def test_before_the_wall_the_picture_says_how_many_steps_are_left():
    grows = {"lowest": 8, "counts": [[4, 0], [0, 4]], "reach": [(-0.5, 50.5), (50.5, 100.5)], "steps": (0, 100)}
    wall = replace(LOSSLESS, **grows, forecast=175)  # type: ignore[arg-type]
    svg = drawn(wall)
    assert "about 75 steps to the wall at this rate" in svg
    line = re.search(r'<line class="wall fall" x1="([\d.]+)" y1="([\d.]+)" x2="([\d.]+)" y2="([\d.]+)"', svg)
    assert line is not None
    x1, y1, x2, y2 = map(float, line.groups())
    assert x1 == pytest.approx(place_of(svg, "50")[0], abs=5), "from the sample of step 51, however far it reaches"
    assert (x2 > x1, y2 < y1) == (True, True)
    late = drawn(replace(wall, reach=[(-0.5, 50.5), (50.5, 250.5)]))
    assert f'x1="{x1:.1f}"' in late, "its reach is not its place"


def test_an_operation_outside_of_all_modules_has_its_name_and_the_end_of_the_format():
    """No layer was sampled there, but the examined step knows what it gave."""
    bare = Wall(
        "fp16", 65504.0, op="exp", expected=128369.0, impact=18, steps=(0, 30), ran={"3": 9}, fp32={"16": 9},
        limits=[Limit(0, 65504.0, 2.0**-24)],
    )  # fmt: skip
    svg = drawn(bare)
    assert {words for words in ("results of exp", "fp16 ends at 65,504", "FP32 has 128,369") if words not in svg} == set()


def test_without_a_cause_the_picture_says_what_was_seen_and_what_to_change():
    svg = wall_svg(LOSSLESS, seen="0.8 bits left", change="use bf16", lang="en", **WORDS)
    assert {words for words in ("What was seen", "0.8 bits left", "What to change", "use bf16") if words not in svg} == set()
