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
                reach=[(-0.5, 0.5)], counts=[[9]], zeros=[0], nonfinite=[0], updates=[(0, 2e-5), (8, 1.5e-5)])  # fmt: skip
    svg = drawn(wall)
    line = float(re.search(r'<line class="wall" [^>]*y1="([\d.]+)"', svg).group(1))  # type: ignore[union-attr]
    (marks,) = re.findall(r'<path class="ghost" d="([^"]+)"', svg)
    heights = [float(y) for y in re.findall(r"M[\d.]+ ([\d.]+)L", marks)]
    assert len(heights) == 2
    assert min(heights) > line
    assert "updates of 1.5e-5" in svg
    assert "below half a spacing of bf16, 0.000488, a step moves nothing" in svg


def test_before_the_wall_the_picture_says_how_many_steps_are_left():
    grows = {"lowest": 8, "counts": [[4, 0], [0, 4]], "reach": [(-0.5, 50.5), (50.5, 100.5)], "steps": (0, 100)}
    wall = replace(LOSSLESS, **grows, forecast=175)  # type: ignore[arg-type]
    svg = drawn(wall)
    assert "about 75 steps to the wall at this rate" in svg
    assert re.search(r'<line class="wall fall"', svg)
