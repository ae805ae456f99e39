"""Tables, numbers and curves as text."""

from __future__ import annotations

import csv
import io
import math

import pytest

from nanny.core.numbers import amount, duration, factor, join_names, power_of_two, share, short, shorten
from nanny.show.spark import BLOCKS, NON_FINITE, sparkline
from nanny.show.tables import Answer, Column, Line, Table, csv_text, render_answer, table_text
from nanny.show.term import columns_of, wrap


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0.0, "0"), (65504.0, "65504"), (math.nan, "NaN"), (-math.inf, "-Inf"), (1.23456e-7, "1.23e-7"),
        (0.000123456, "0.000123"), (3.14159, "3.14"), (123456789.0, "1.23e8"), (12, "12"),
    ],
)  # fmt: skip
def test_numbers_are_short_and_non_finite_ones_have_names(value: float | None, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("fraction", "text"), [(0.0, "0 %"), (1e-9, "<0.01 %"), (0.5, "50 %"), (0.99999, ">99.9 %"), (1.0, "100 %"), (None, "-")]
)
def test_a_small_share_is_not_shown_as_nothing_nor_a_large_one_as_all(fraction: float | None, text: str) -> None:
    assert share(fraction) == text


def test_small_words() -> None:
    assert (power_of_two(65536.0), power_of_two(0.25), power_of_two(3.0)) == ("2**16", "2**-2", "3")
    assert (amount(1, "layer"), amount(3, "layer"), amount(0, "layer")) == ("1 layer", "3 layers", "no layers")
    assert join_names(["a", "b", "c", "d"], 2) == "a, b and 2 more"
    assert (duration(0.03), duration(75), duration(7500)) == ("30 ms", "1 min 15 s", "2 h 05 min")
    assert (factor(3.0), factor(0.25), factor(1.08)) == ("3 times larger", "4 times smaller", "8 % larger")


@pytest.mark.parametrize("width", [1, 5, 12, 20, 33, 60])
def test_long_names_fit_the_width_whatever_it_is(width: int) -> None:
    name = "transformer.encoder.layer.217.attention.output.dense_projection.weight"
    assert len(shorten(name, width)) <= width
    assert len(shorten("x" * 80, width)) <= width


def test_a_shortened_name_keeps_its_number_and_its_end() -> None:
    short_form = shorten("transformer.encoder.layer.217.attention.output.dense_projection.weight", 40)
    assert ".217." in short_form
    assert short_form.endswith("weight")


def test_a_single_bad_step_is_never_averaged_away() -> None:
    values = [1.0] * 5000
    values[3333] = math.nan
    assert sparkline(values, 60).count(NON_FINITE) == 1


def test_a_single_peak_shows_at_full_height() -> None:
    values = [1.0] * 5000
    values[17] = 9.0
    assert sparkline(values, 60)[0] == BLOCKS[-1]


def test_a_change_too_small_to_matter_is_drawn_flat() -> None:
    assert set(sparkline([1.0, 1.001, 0.9995], 60)) == {BLOCKS[3]}
    assert set(sparkline([1024.0, 1024.5], 60, log=True)) == {BLOCKS[3]}
    assert len(set(sparkline([1.0, 1.05], 60))) == 2


@pytest.mark.parametrize("values", [[], [0.0], [math.inf], [math.nan] * 3, [-1.0, 1.0], [0.0, 1e-40, 1e38], [5.0] * 200])
@pytest.mark.parametrize("log", [False, True])
def test_any_curve_can_be_drawn(values: list[float], log: bool) -> None:
    assert len(sparkline(values, 60, log=log)) == min(len(values), 60)


TABLE = Table(
    (Column("layer", elastic=True), Column("norm")),
    [["encoder." * 20 + "last", 1.5], ["a|b_c*", math.nan], ["third", None]],
    most=2,
    rest="layers",
)


def test_a_table_gives_way_in_its_names_and_counts_the_rest() -> None:
    lines = table_text(TABLE, 60).splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0].endswith("norm")
    assert lines[-1] == "… and 1 more layers"


def test_what_is_said_of_the_rows_beyond_fits_the_width() -> None:
    rest = "layers, 31 of them with a note (blocks.0.attn.out.bias, blocks.0.mlp.0.weight and 29 more)"
    said = table_text(Table((Column("layer"),), [["embed"]] * 9, most=3, rest=rest), 80).split("\n")
    assert max(map(len, said)) <= 80
    assert "29 more)" in said[-1]


def test_csv_holds_all_rows_unshortened() -> None:
    rows = list(csv.reader(io.StringIO(csv_text(TABLE))))
    assert rows[1][0] == "encoder." * 20 + "last"
    assert [row[1] for row in rows[1:]] == ["1.5", "nan", ""]


def test_markdown_escapes_what_would_break_a_cell() -> None:
    text = render_answer(Answer(tables=[TABLE]), "markdown")
    assert "a\\|b\\_c\\*" in text


def test_a_name_cannot_steer_the_terminal() -> None:
    evil = Answer(lines=[Line("\x1b[2Jboo")], tables=[Table((Column("layer"),), [["\x1b]0;title\x07"]])])
    assert "\x1b" not in render_answer(evil, "text")
    assert "\x1b" not in render_answer(evil, "markdown")


def test_long_lines_are_wrapped_with_their_indent() -> None:
    text = render_answer(Answer(lines=[Line("word " * 60, indent=4)]), "text", width=80)
    first, *others = text.splitlines()
    assert max(map(len, (first, *others))) <= 80
    assert all(line.startswith("    word") for line in others)


def test_a_path_or_command_is_cut_in_the_middle_and_not_at_its_dots() -> None:
    assert shorten("experiments/first/nanny_logs/metrics.db", 20) == "experi…gs/metrics.db"
    assert shorten("../train.py --lr 0.001", 16) == "../tr…--lr 0.001"
    assert shorten("unscaled_attention.py", 16) == "unsca…tention.py"


def test_at_80_columns_a_table_leaves_out_its_last_columns_and_names_them() -> None:
    columns = (Column("layer", elastic=True), *(Column(f"a_rather_long_head_{i}") for i in range(6)))
    shown = table_text(Table(columns, [["encoder.layers.11.attention.output", *[0.5] * 6]]), width=80)
    assert max(map(len, shown.splitlines())) <= 80
    assert "a_rather_long_head_0" in shown.splitlines()[0]
    assert "too narrow for: a_rather_long_head_2, a_rather_long_head_3" in shown


def test_chinese_is_wrapped_by_the_columns_it_fills_and_a_percentage_stays_whole() -> None:
    lines = wrap("   在 FP32 下同一结果达到 68,926，超过 fp16 的 65,504：其 256 个结果中有 0.391 % 变为无穷，损失为 NaN。", 40, 5)
    assert all(columns_of(line) <= 40 for line in lines)
    assert len(lines) > 2
    assert not any(line.lstrip()[0] in "，。：%" for line in lines)
    assert "".join(line.strip() for line in lines).replace(" ", "").count("0.391%") == 1
