"""`nanny report` in a real browser: what a tired engineer sees and clicks."""

from __future__ import annotations

import dataclasses
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Watched, broken_numbers, cut_texts, violations, watched_page
from runs.query_recordings import HEALTHY, SICK, Recipe, nanny, record
from show.test_chinese import BROKEN, english_in

from nanny.cli import main
from nanny.core.finding import Finding, Severity
from nanny.core.step import GRADIENT_STATS, RunInfo, Sample, Site
from nanny.store.writer import RunWriter
from nanny.web.data import page_data
from nanny.web.report import write_report
from web.unpacking import unpack_array

HOSTILE = (
    "</script><script>alert(1)</script>",
    "\"quotes' & <b>bold</b>",
    "<img src=x onerror=alert(1)>",
    '<a href="javascript:alert(1)">link</a>',
    "层.注意力.输出",
    "long." * 1000,
    "{{data}}",
    "back`tick`",
)
NANS = Recipe(
    layers={"a": (0, -8), "b": (1, -8)}, steps=12, trace_every=4, nan_output=(0, "a"), loss_is_nan_from=0,
    findings=(Finding("NAN", Severity.ERROR, "the loss is NaN", site="loss", step=0, value=math.nan),),
)  # fmt: skip


@pytest.fixture(scope="module")
def sick(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sick")
    write_report(folder / "report.html", record(folder, SICK))
    return folder / "report.html"


@pytest.fixture(scope="module")
def shared(chromium, sick) -> Iterator[Watched]:
    """The page is opened once: that takes longer than what the tests do on it."""
    with watched_page(chromium) as watched:
        watched.page.goto(sick.as_uri())
        watched.drawn().evaluate("() => { window.atFirst = structuredClone(state); }")
        yield watched


@pytest.fixture
def opened(shared) -> Watched:
    page = shared.page
    page.mouse.move(0, 0)
    page.evaluate("() => { update(structuredClone(window.atFirst)); setUpFindings(); drawControls(); scrollTo(0, 0); }")
    page.wait_for_function("() => !linking")
    settled(page, 20)
    assert shared.trouble == []
    return shared


def lines_at(page: Any) -> dict[str, float | None]:
    """Where the vertical line of each plot stands."""
    return dict(
        page.evaluate(
            """() => Object.fromEntries(["curves", "heat", "histogram"].map((name) => {
              const shapes = document.getElementById(`${name}-figure`).layout?.shapes || [];
              const line = shapes.find((s) => s.type === "line" && s.yref === "paper" && s.line.dash === undefined);
              return [name, line ? line.x0 : null];
            }))"""
        )
    )


def settled(page: Any, step: int) -> None:
    """Waits until all three plots show the step."""
    page.wait_for_function(
        """(step) => ["curves", "heat", "histogram"].every((name) =>
             (document.getElementById(`${name}-figure`).layout?.shapes || []).some((s) => s.type === "line" && s.x0 === step))""",
        arg=step,
    )


def test_the_first_screen_says_what_is_wrong_where_and_what_to_do(opened):
    page = opened.page
    culprit = page.locator(".culprit")
    box = culprit.bounding_box()
    assert box["y"] + box["height"] < 1000  # without scrolling
    assert "NOT HEALTHY" in page.locator("h1").inner_text()
    for words in ("NAN_OUTPUT", "head.softmax", "step 20", "3 of 256 outputs are NaN", "compute the softmax in FP32", "head.out"):
        assert words in culprit.inner_text()


def test_all_views_open_on_the_culprit(opened):
    assert lines_at(opened.page) == {"curves": 20, "heat": 20, "histogram": 20}
    assert opened.page.locator("#histogram-title").inner_text() == "head.softmax · outputs"


def test_a_click_on_a_finding_moves_all_views_and_the_address(opened):
    page = opened.page
    page.locator("#finding-list button", has_text="HEADROOM").click()
    settled(page, 10)
    assert "step=10" in page.url
    assert "site=head.softmax" in page.url
    assert page.locator("li.chosen").inner_text().startswith("▲ WARNING")


def test_a_click_changes_what_it_must_and_leaves_the_rest_standing(opened):
    page = opened.page
    choose = "async (step) => { choose(page.findings.findIndex((one) => one.step === step)); await drawHistogram(); }"
    page.evaluate(choose, 20)
    keep = """() => { const parts = '#finding-list li, #tree-space .tree-row, #histogram-figure .ytick';
        window.kept = [...document.querySelectorAll(parts)];
        window.picture = document.querySelector('#histogram-figure .imagelayer image').getAttribute('href');
        return kept.length; }"""
    assert page.evaluate(keep) > 10
    page.evaluate(choose, 10)
    assert lines_at(page)["histogram"] == 10
    assert page.evaluate("() => kept.filter((one) => !one.isConnected).length") == 0
    page.evaluate("async () => { update({ site: 'head.out' }); await drawHistogram(); }")
    assert page.evaluate("() => document.querySelector('#histogram-figure .imagelayer image').getAttribute('href') !== picture")


def test_a_click_on_a_cell_moves_all_views_to_its_layer_and_step(opened):
    page = opened.page
    page.locator("#heat-figure").scroll_into_view_if_needed()
    place = page.locator("#heat-figure .nsewdrag").bounding_box()
    cell = place["x"] + place["width"] * 30.5 / 40, place["y"] + place["height"] * 0.1  # step 30 of the first of five layers
    page.mouse.move(*cell)
    page.wait_for_selector("#tip:not([hidden])")
    assert "stem" in page.locator("#tip").inner_text()
    page.mouse.click(*cell)
    settled(page, 30)
    assert page.locator("#histogram-title").inner_text() == "stem · outputs"


def test_the_picture_of_the_run_is_drawn_and_can_be_saved(opened):
    page = opened.page
    assert page.locator("#wall img").evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
    assert page.locator("#wall img").get_attribute("alt").startswith("NOT HEALTHY: 2 errors")
    saved = page.locator("#wall a").get_attribute("href")
    assert "fp16%20ends%20at%2065%2C504" in saved
    assert "c8451b" in page.locator("#icon").get_attribute("href"), "a sick run is red among the tabs"


def test_a_click_on_a_curve_moves_all_views_to_its_step(opened):
    page = opened.page
    plot = page.locator("#curves-figure .nsewdrag").nth(1)
    plot.scroll_into_view_if_needed()
    place = plot.bounding_box()
    page.mouse.move(place["x"] + place["width"] * 0.25, place["y"] + 30)
    page.wait_for_timeout(200)
    page.mouse.click(place["x"] + place["width"] * 0.25, place["y"] + 30)
    page.wait_for_function("() => state.step !== 20")
    step = page.evaluate("state.step")
    assert 7 <= step <= 12
    settled(page, step)


def test_keys_walk_through_the_findings(opened):
    page = opened.page
    page.keyboard.press("p")
    settled(page, 10)
    page.keyboard.press("n")
    settled(page, 20)


def test_findings_are_filtered_by_severity_code_and_text(opened):
    page = opened.page
    shown = page.locator("#finding-list li[data-index]")
    assert shown.count() == 3
    page.get_by_label("severity").select_option("error")
    assert shown.count() == 2
    page.get_by_label("code").select_option("LOSS_NAN")
    assert shown.count() == 1
    page.get_by_label("code").select_option("")
    page.get_by_label("severity").select_option("")
    page.get_by_label("layer or text").fill("softmax")
    assert shown.count() == 2
    page.get_by_label("layer or text").fill("no such thing")
    assert "No finding matches" in page.locator("#finding-list").inner_text()


@pytest.mark.slow
def test_the_tree_marks_where_the_first_bad_number_was_born(opened):
    page = opened.page
    rows = page.locator("#tree-space .tree-row")
    assert rows.all_inner_texts()[0].split("\n")[1] == "stem"
    born = page.locator("#tree-space .tree-row.born")
    assert "softmax" in born.inner_text()
    assert "step 20" in born.inner_text()
    assert born.get_attribute("aria-selected") == "true"
    heads = page.locator(".tree-row.head [role=columnheader]").all_inner_texts()
    assert len(heads) == 7
    assert all(heads)
    assert born.locator(".quiet").first.inner_text() in ("fp16", "fp32", "bf16")
    strip = "() => document.querySelector('#tree-space .tree-row.born canvas').toDataURL()"
    headroom = page.evaluate(strip)
    page.locator("[data-pick=quantity]").select_option("absmax")
    page.wait_for_function(f"(before) => ({strip})() !== before", arg=headroom)
    mark = "document.getElementById('heat-figure').layout.annotations.map((one) => [one.x, heat.matrix.names[heat.rows[one.y]]])"
    assert page.evaluate(mark) == [[20, "head.softmax"]]
    page.locator("[data-pick=order]").select_option("risk")
    assert page.locator("#tree-space .tree-row").first.inner_text().split("\n")[1] == "head.softmax"


def test_the_tree_is_walked_folded_and_searched_with_keys(opened):
    page = opened.page
    page.locator("#tree-grid").focus()
    for key in ("Home", "ArrowDown", "ArrowLeft"):  # body is closed
        page.keyboard.press(key)
    names = [text.split("\n")[1] for text in page.locator("#tree-space .tree-row").all_inner_texts()]
    assert names[1:3] == ["body.0", "head"]  # a chain of one part is one row
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    assert "the culprit is inside" in page.locator("#tree-row-2").inner_text()
    assert page.locator("#tree-row-2").get_attribute("aria-expanded") == "false"
    page.keyboard.press("ArrowRight")
    page.locator("body").click(position={"x": 3, "y": 3})
    page.keyboard.press("/")
    page.keyboard.type("out")
    assert [text.split("\n")[1] for text in page.locator("#tree-space .tree-row").all_inner_texts()] == ["head.out"]


@pytest.mark.slow
def test_five_thousand_modules_are_a_tree_and_not_a_barcode(tmp_path, chromium):
    layers = {f"net.layers.{i // 10}.part{i % 10}": (i % 5, -8.0) for i in range(5000)}
    write_report(tmp_path / "report.html", record(tmp_path, Recipe(layers=layers, steps=2, trace_every=1)))
    assert (tmp_path / "report.html").stat().st_size < 5e6
    with watched_page(chromium) as watched:
        watched.page.goto((tmp_path / "report.html").as_uri())
        page = watched.drawn()
        assert page.locator("#tree-space .tree-row").count() < 40
        assert violations(page) == [], "what scrolls has the keys"
        assert not page.locator("#heat-figure").is_visible()
        assert not page.locator("#heat .save").is_visible(), "nothing to take along"
        page.evaluate("() => update({ site: 'net.layers.499.part9' })")
        page.locator("#tree-grid").focus()
        page.keyboard.press("End")
        assert page.locator("#tree-space .tree-row").last.inner_text().split("\n")[1] == "499"
        bottom = "(one) => one.getBoundingClientRect().bottom"
        last, grid = (page.locator(place).last.evaluate(bottom) for place in ("#tree-space .tree-row", "#tree-grid"))
        assert last <= grid + 1, "and the last row is in view"
        page.click("#map")
        page.wait_for_function("() => heat !== null && document.getElementById('heat-figure').data.length > 0")
        assert page.locator("#heat .save").is_visible()


def test_back_takes_a_click_back_and_the_finding_is_in_the_link(opened):
    page = opened.page
    page.locator("#findings li").first.locator("button").click()
    assert "finding=0" in page.url
    there = page.evaluate("() => state.step")
    page.locator("#findings li").nth(1).locator("button").click()
    assert page.evaluate("() => state.step") != there
    page.go_back()
    page.wait_for_function("(step) => state.step === step && state.finding === 0", arg=there)


def test_figures_have_names_words_keys_and_can_be_taken_along(opened):
    page = opened.page
    for name in ("curves", "heat", "histogram"):
        place = page.locator(f"#{name}-figure")
        assert place.get_attribute("aria-label")
        assert page.locator(f"#{place.get_attribute('aria-describedby')}").text_content()
    page.locator("#curves-figure").focus()
    before = page.evaluate("() => state.step")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("() => state.step") == before - 1
    page.keyboard.press("ArrowDown")
    assert page.evaluate("() => state.site") == "head.out"
    with page.expect_download() as saved:
        page.click("#curves .save button:has-text('CSV')")
    lines = Path(saved.value.path()).read_text().splitlines()
    assert lines[0] == "curve,step,value"
    assert lines[1].startswith("loss,0,2.")
    page.locator("body").press("?")
    assert page.locator("#help").is_visible()
    page.locator("#help button").click()


@pytest.mark.slow
def test_on_a_phone_nothing_is_wider_than_the_screen(sick, chromium):
    with watched_page(chromium, viewport={"width": 390, "height": 844}) as watched:
        watched.page.goto(sick.as_uri())
        page = watched.drawn()
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
        assert page.evaluate("() => getComputedStyle(document.querySelector('#whatif thead')).display") == "none"
        plots = page.locator(".js-plotly-plot").evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().width)")
        assert min(plots) > 330
        last = "(curve) => { curve.values.push(1.54e-6); curve.steps.push(lastStep()); }"
        page.evaluate(f"() => {{ Object.values(page.curves).forEach({last}); return drawCurves(); }}")
        assert page.locator("#curves-figure text", has_text="1.54e-6").count() > 0
        assert cut_texts(page) == []
        cut = "(all) => all.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.innerText)"
        assert page.locator("#tree-space .number, #tree-space .mark").evaluate_all(cut) == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 390, 430, 1024])
def test_no_number_is_broken_and_no_table_cut_beside_another_run(width, tmp_path, chromium):
    small = {"stem": (-9, -20), "body.0": (-9, -20), "head.softmax": (-9, -20), "head.out": (-9, -20)}
    message = "the norm should be 6.01e-06 and is 1.25e-07, which 99.5 % of all 1,234,567 elements lose beside FP32; " * 3
    findings = (Finding("UNDERFLOW", Severity.ERROR, message, "raise 1.5e-05 by 12 %", site="stem", step=20),)
    path = record(tmp_path, dataclasses.replace(HEALTHY, layers=small, steps=200))
    record(tmp_path, dataclasses.replace(HEALTHY, layers=small, steps=200, final_loss=1.2, findings=findings, seed=1))
    write_report(tmp_path / "r.html", path, run=2, compare="1")
    with watched_page(chromium, viewport={"width": width, "height": 844}) as watched:
        watched.page.goto((tmp_path / "r.html").as_uri())
        page = watched.drawn()
        assert "6.01e-06" in page.locator("#verdict").inner_text()
        assert broken_numbers(page) == []
        assert page.locator(".scroll").evaluate_all("(all) => all.filter((one) => one.scrollWidth > one.clientWidth).length") == 0


def test_axe_finds_nothing(opened):
    assert violations(opened.page) == []


@pytest.mark.slow
def test_axe_finds_nothing_on_a_dark_phone(sick, chromium):
    size = {"width": 390, "height": 844}
    with watched_page(chromium, color_scheme="dark", viewport=size) as watched:
        watched.page.goto(sick.as_uri())
        assert violations(watched.drawn()) == []


def test_the_browser_reads_the_numbers_that_python_wrote(opened, sick):
    data = page_data(sick.parent)
    wanted = unpack_array(data["kinds"]["grad"]["quantities"]["norm"]["codes"]).ravel().tolist()
    got = opened.page.evaluate("async () => [...(await matrixOf('grad', 'norm')).codes]")
    assert got == wanted
    steps = opened.page.evaluate("page.curves.loss.steps")
    assert steps == list(range(40))


@pytest.mark.slow
def test_every_quantity_of_every_kind_can_be_drawn(opened):
    page = opened.page
    for kind in page.locator('[data-pick="kind"] option').evaluate_all("(options) => options.map((o) => o.value)"):
        page.locator('[data-pick="kind"]').select_option(kind)
        for quantity in page.locator('[data-pick="quantity"] option').evaluate_all("(options) => options.map((o) => o.value)"):
            page.locator('[data-pick="quantity"]').select_option(quantity)
            page.wait_for_function("([k, q]) => heat.quantity === q && state.kind === k && !linking", arg=[kind, quantity])
    assert page.evaluate("document.getElementById('heat-figure').data[0].z.length") == 5


def levels(page: Any) -> set[float]:
    """The levels on the heat map; not sampled is None."""
    look = "document.getElementById('heat-figure').data[0].z.flatMap((row) => [...row].map((v) => (v === v ? v : null)))"
    return set(page.evaluate(look))


def test_not_sampled_zero_and_non_finite_look_different(opened):
    page = opened.page
    found = levels(page)
    assert {None, 255} <= found
    colours = page.evaluate("document.getElementById('heat-figure').data[0].colorscale.map(([, c]) => c)")
    assert colours[0] != colours[-1]
    hatch = page.evaluate("getComputedStyle(document.querySelector('#heat-figure .bglayer .bg')).fill")
    assert "hatch" in hatch


def large_run(folder: Path, layers: int, steps: int, bad: tuple[int, int]) -> Path:
    """Gradients only, all alike but one."""
    writer = RunWriter(folder, RunInfo(started=1.0))
    writer.add_sites([Site("grad", f"block.{i}.weight", "float32", (4,)) for i in range(layers)])
    sizes = np.random.default_rng(0).lognormal(size=(steps, layers)).astype("<f4")
    sizes[bad] = np.nan
    for step, row in enumerate(sizes):
        data = np.stack([np.full(layers, 4, "<f4"), row, -row, row])
        writer.add_sample(Sample("grad", step, GRADIENT_STATS, data.tobytes()))
    writer.add_scalars(steps - 1, {"loss": 1.0})
    writer.close("finished")
    return writer.path


@pytest.mark.slow
def test_one_bad_cell_among_a_million_is_seen_and_named(tmp_path, chromium):
    write_report(tmp_path / "r.html", large_run(tmp_path, layers=700, steps=1500, bad=(1234, 567)))
    with watched_page(chromium) as watched:
        watched.page.goto((tmp_path / "r.html").as_uri())
        page = watched.drawn()
        page.click("#map")  # of many layers the map is drawn for who asks
        page.wait_for_function("() => heat !== null && document.getElementById('heat-figure').data?.length > 1")
        assert 255 in levels(page)
        assert page.evaluate("document.getElementById('heat-figure').data[1].x.length") == 1  # and one cross on it
        cell = page.evaluate(
            """() => { const { grid, matrix, rows, range } = heat, at = grid.codes.indexOf(65535);
                       const cell = worstUnder(matrix, rows, range, grid, at % grid.width, Math.floor(at / grid.width));
                       return [cell.step, matrix.names[cell.row]]; }"""
        )
        assert cell == [1234, "block.567.weight"]


def test_hostile_names_are_harmless(tmp_path, chromium):
    findings = tuple(Finding("NAN", Severity.ERROR, f"{n} broke", n, site=n, step=20 + i) for i, n in enumerate(HOSTILE))
    recipe = Recipe(layers=dict.fromkeys(HOSTILE, (0.0, -8.0)), findings=findings, amp_dtype="float16", scale=256.0)
    write_report(tmp_path / "r.html", record(tmp_path, recipe))
    with watched_page(chromium) as watched:
        watched.page.goto((tmp_path / "r.html").as_uri())
        page = watched.drawn()
        assert HOSTILE[0] in page.locator(".culprit").inner_text()
        for i in range(len(HOSTILE)):
            page.keyboard.press("n")
            settled(page, 20 + (i + 1) % len(HOSTILE))
        assert page.locator("#views img, #findings img, .figure a").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def empty_run(folder: Path) -> Path:
    writer = RunWriter(folder, RunInfo(started=1.0, argv=("train.py",)))
    writer.close("finished")
    return writer.path


def run_of_nan(folder: Path) -> Path:
    return record(folder, NANS)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "words"), [(run_of_nan, "NOT HEALTHY"), (empty_run, "NO VERDICT")])
def test_runs_of_nothing_but_nan_and_of_nothing_at_all_are_drawn(make, words, tmp_path, chromium):
    write_report(tmp_path / "r.html", make(tmp_path))
    with watched_page(chromium) as watched:
        watched.page.goto((tmp_path / "r.html").as_uri())
        assert words in watched.drawn().locator("h1").inner_text()


def test_a_healthy_run_is_called_healthy_and_shows_its_largest_layer(tmp_path, chromium):
    write_report(tmp_path / "r.html", record(tmp_path, HEALTHY))
    with watched_page(chromium, color_scheme="dark") as watched:
        watched.page.goto((tmp_path / "r.html").as_uri())
        page = watched.drawn()
        assert page.locator("h1").inner_text().startswith("✓ HEALTHY")
        assert page.locator("#histogram-title").inner_text() == "head · outputs"
        assert "No findings" in page.locator("#findings").inner_text()
        top = "document.getElementById('curves-figure').layout.yaxis2.domain[1]"
        assert page.evaluate(top) == pytest.approx(1), "no empty row where findings would be marked"
        assert "◆" not in page.locator("#heat").inner_text()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 19, 23)"


@pytest.mark.parametrize(("lang", "locale"), [pytest.param("zh", "en-US", marks=pytest.mark.slow), (None, "zh-CN")])
def test_the_page_speaks_chinese_if_asked_and_an_address_restores_what_was_chosen(lang, locale, tmp_path, chromium):
    write_report(tmp_path / "r.html", record(tmp_path, BROKEN), lang=lang)
    with watched_page(chromium, locale=locale) as watched:
        watched.page.goto(f"{(tmp_path / 'r.html').as_uri()}#step=30&site=stem&kind=output&quantity=headroom&format=bf16")
        page = watched.drawn()
        settled(page, 30)
        assert page.locator("#histogram-title").inner_text() == "stem · 输出"
        assert page.locator('[data-pick="quantity"]').input_value() == "headroom"
        assert page.locator('[data-pick="format"]').input_value() == "bf16"
        assert "不健康" in page.locator("h1").inner_text()
        assert page.evaluate("document.documentElement.lang") == "zh"
        texts = """() => { const copy = document.body.cloneNode(true);
          copy.querySelectorAll("code, .site, pre, script, style, svg").forEach((place) => place.remove());
          return [...copy.querySelectorAll("*")].filter((place) => !place.children.length).map((place) => place.textContent); }"""
        assert [words for text in page.evaluate(texts) for words in english_in(text)] == []
        page.click("#language")
        assert "NOT HEALTHY" in page.locator("h1").inner_text()
        assert "lang=en" in page.url
        assert page.evaluate("document.documentElement.lang") == "en"


@pytest.mark.slow
def test_two_runs_show_where_they_part(tmp_path, chromium):
    path = record(tmp_path, dataclasses.replace(HEALTHY, steps=200))
    record(tmp_path, dataclasses.replace(HEALTHY, steps=200, final_loss=1.2, amp_dtype="bfloat16"))
    write_report(tmp_path / "r.html", path, run=2, compare="1")
    with watched_page(chromium) as watched:
        watched.page.goto((tmp_path / "r.html").as_uri())
        page = watched.drawn()
        assert "PART FIRST at step" in page.locator("#comparison").inner_text()
        other = page.evaluate("document.getElementById('curves-figure').data.find((t) => t.meta === 'other:loss').y.length")
        assert other == 200
        assert page.locator('[data-pick="quantity"]').input_value() == "ratio"
        assert page.evaluate("heat.quantity") == "ratio"
        ratios = page.evaluate("[...new Set(heat.matrix.codes)].filter((code) => code > 0).map((code) => 2 ** log2Of(code))")
        assert all(0.2 < ratio < 5 for ratio in ratios)
        own, beside = page.evaluate("[shown.bars.x, shown.beside.x]")
        assert sum(own) == pytest.approx(1, rel=0.1)
        assert sum(beside) == pytest.approx(1, rel=0.1)
        assert "run 1 at the same step" in page.locator("#histogram-note").inner_text()


def test_every_stretch_without_a_finite_loss_is_shaded_and_a_wide_loss_is_on_a_log_axis(opened):
    page = opened.page
    spans = "(curve) => badStretches(curve).map(([from, until]) => [from, until])"
    curve = {"steps": [0, 1, 2, 3, 4, 5], "values": [1.0, None, 2.0, None, None, 3.0]}
    assert page.evaluate(spans, curve) == [[1, 2], [3, 5]]
    titles = """(id) => Object.entries(document.getElementById(id).layout).filter(([name, axis]) => /^[xy]axis/.test(name)
        && axis.visible !== false && !axis.matches).map(([name, axis]) => (axis.title && axis.title.text) || '')"""
    for figure in ("curves-figure", "heat-figure", "histogram-figure"):
        assert any(page.evaluate(titles, figure)), figure
    kind = "() => Object.entries(document.getElementById('curves-figure').layout).find(([name]) => name === 'yaxis2')[1].type"
    assert page.evaluate(kind) == "linear"
    page.get_by_label("loss axis").select_option("log")
    page.wait_for_function(f"() => ({kind})() === 'log'")
    assert "axis=log" in page.url
    page.evaluate(
        "() => { update({ axis: '' }); page.kept = page.curves.loss; page.curves.loss = { steps: [0, 1], values: [500, 1] }; }"
    )
    assert page.evaluate("() => isLossOnLog()")
    page.evaluate("() => { page.curves.loss = page.kept; }")
    lines = "() => document.getElementById('curves-figure').data.filter((trace) => trace.meta === 'loss').length"
    page.get_by_label("smoothing").select_option("yes")
    page.wait_for_function(f"() => ({lines})() === 2")
    assert page.evaluate("() => averaged([1, NaN, 2])[2]") == pytest.approx(1.1)


@pytest.mark.slow
def test_zooming_one_plot_zooms_the_others(opened):
    page = opened.page
    page.evaluate("Plotly.relayout('curves-figure', {'xaxis.range[0]': 5, 'xaxis.range[1]': 15})")
    page.wait_for_function("() => document.getElementById('heat-figure').layout.xaxis.range[1] === 15")
    assert page.evaluate("document.getElementById('histogram-figure').layout.xaxis.range") == [5, 15]


def test_the_command_writes_one_file_and_says_so(tmp_path):
    record(tmp_path, SICK)
    done = nanny("report", "--db", tmp_path, "-o", tmp_path / "out" / "report.html", cwd=tmp_path)
    assert done.returncode == 0
    assert "report.html" in done.stdout
    assert (tmp_path / "out" / "report.html").stat().st_size < 8_000_000


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--db", "nowhere"], "no such file or folder"),
        (["--run", "7"], "there is no run 7"),
        (["--compare", "9"], "there is no run 9"),
        (["-o", "/proc/nothing/report.html"], "name another file with -o"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(argv, words, tmp_path, capsys):
    record(tmp_path, SICK)
    assert main(["report", *([] if "--db" in argv else ["--db", str(tmp_path)]), *argv]) == 2
    assert words in capsys.readouterr().err


def test_the_wheel_carries_the_files_of_the_page(tmp_path):
    from hatchling.builders.wheel import WheelBuilder

    root = Path(__file__).parents[2]
    (wheel,) = WheelBuilder(str(root)).build(directory=str(tmp_path), versions=["standard"])
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = [file for file in (root / "src/nanny").rglob("assets/*") if file.suffix in (".js", ".css", ".html")]
    assert len(files) >= 8
    assert {file.relative_to(root / "src").as_posix() for file in files} <= inside


def test_codes_in_the_browser_mean_the_same_values(opened):
    values = opened.page.evaluate("[codeOf(Math.log2(65504)), codeOf(-24)].map((code) => 2 ** log2Of(Math.round(code)))")
    assert np.allclose(values, [65504, 2.0**-24], rtol=0.003)


@pytest.mark.parametrize(
    ("steps", "drawn"),
    [
        ([0, 500, 510], [[0, 3], [50, 51], [51, 54]]),
        ([0, 100, 200, 300], [[0, 3], [10, 13], [20, 23], [30, 33]]),  # what nobody looked at stays empty
        ([0, 20, 40], [[0, 2], [2, 4], [4, 7]]),  # nearer than an eye can tell apart
        ([500], [[50, 53]]),
        ([0, 995], [[0, 3], [99, 100]]),
    ],
)
def test_a_sample_is_drawn_where_it_was_taken(opened, steps, drawn):
    reach = [edge for start, end in zip(steps, [*steps[1:], 1e9]) for edge in (start, end)]
    matrix = f"{{ steps: {steps}, bounds: {list(range(len(steps) + 1))}, reach: {reach} }}"
    found = opened.page.evaluate(f"{steps}.map((_, column) => cellsOf({matrix}, column, [0, 1000], 100))")
    assert found == drawn


@pytest.mark.slow
def test_between_two_samples_the_nearer_one_is_described(opened):
    column = "(step) => columnAt({ steps: [0, 48, 49, 60], bounds: [0, 1, 3, 4], reach: new Array(6) }, step)"
    steps = (0, 20, 47, 48, 49, 53, 55, 1e9, math.inf)
    found = [opened.page.evaluate(f"({column})({'Infinity' if step == math.inf else step})") for step in steps]
    assert found == [0, 0, 1, 1, 1, 1, 2, 2, 2]
    told = """(step) => { Object.assign(state, { step, site: 'stem', kind: 'output' });
        return describePlace().then(() => document.getElementById('place').textContent); }"""
    assert opened.page.evaluate(f"({told})(10)").startswith("step 10: ")
    assert opened.page.evaluate(f"({told})(12)").startswith("nearest sample, step 10: ")


@pytest.mark.slow
def test_a_layer_beyond_the_format_is_not_said_to_have_room(tmp_path, chromium):
    write_report(tmp_path / "r.html", record(tmp_path, Recipe(layers={"big": (20.0, 18.0)}, steps=8, trace_every=4)))
    with watched_page(chromium) as watched:
        watched.page.goto((tmp_path / "r.html").as_uri())
        watched.drawn().evaluate("() => update({ step: 4, site: 'big', kind: 'output', format: 'fp16' })")
        watched.page.locator("#place", has_text="bits beyond the end of FP16").wait_for(timeout=20_000)
        assert "-" not in watched.page.text_content("#place").split("bits")[0]
        watched.page.evaluate("() => update({ kind: 'output_grad' })")
        watched.page.locator("#histogram-title", has_text="gradients of outputs").wait_for(timeout=20_000)
        watched.page.evaluate("() => describePlace()")
        assert watched.page.text_content("#place").count("largest magnitude") == 1


def test_the_share_that_fp16_flushes_is_told_of_fp16(opened):
    page = opened.page
    told = "async () => { await describePlace(); return document.getElementById('place').textContent; }"
    page.evaluate("() => update({ format: 'fp16', kind: 'grad', site: 'stem.weight', step: 10 })")
    assert "flushed to zero" in page.evaluate(told)
    page.evaluate("() => update({ format: 'bf16' })")
    assert "flushed to zero" not in page.evaluate(told)


def test_a_curve_is_smoothed_beside_itself(opened):
    page = opened.page
    traces = "() => document.getElementById('curves-figure').data.filter((one) => one.meta === 'loss').length"
    assert page.evaluate(traces) == 1
    page.locator("[data-pick=smooth]").select_option("yes")
    page.wait_for_function(f"() => ({traces})() === 2")  # the curve itself stays, pale
    assert "smooth=yes" in page.url


HEADS = {"curves": "curve,step,value", "heat": "layer,step,absmax", "histogram": "step,binary order,share"}


@pytest.mark.parametrize("name", HEADS)
def test_every_figure_can_be_saved_as_picture_drawing_and_table(name, opened):
    page = opened.page
    for form, start in (("PNG", b"\x89PNG"), ("SVG", b"<svg"), ("CSV", HEADS[name].encode())):
        with page.expect_download() as saved:
            page.click(f"#{name} .save button:has-text('{form}')")
        read = Path(saved.value.path()).read_bytes()
        assert read.startswith(start)
        assert saved.value.suggested_filename.endswith(f"{name}.{form.lower()}")
    assert len(read.splitlines()) > 10


def test_a_zoom_is_in_the_link(opened, chromium):
    opened.page.evaluate("() => update({ range: [5, 15] })")
    with watched_page(chromium) as other:
        other.page.goto(opened.page.url)
        assert (
            other.drawn().evaluate("() => [state.range, document.getElementById('heat-figure').layout.xaxis.range]")
            == [[5, 15]] * 2
        )


def test_printed_no_figure_is_split_and_no_button_is_shown(opened):
    page = opened.page
    page.emulate_media(media="print", color_scheme="dark")
    page.set_viewport_size({"width": 718, "height": 1000})  # of A4, between its margins
    page.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    right = "const right = (one) => one.getBoundingClientRect().right; return"
    cut = "all.filter((one) => !one.getAttribute('viewBox') || right(one) > right(one.closest('section'))).length"
    wide = page.evaluate(f"() => {{ const all = [...document.querySelectorAll('.main-svg')]; {right} {cut}; }}")
    # in one task: darkness draws the figures anew, and what was found before that is no longer there
    texts = "[...document.querySelectorAll('.figure text')]"
    inks = page.evaluate(f"() => [...new Set({texts}.map((one) => getComputedStyle(one).fill))]")
    ground = page.evaluate("() => getComputedStyle(document.querySelector('section')).backgroundColor")
    names = page.locator("#tree-space .tail").evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().width)")
    look = "(all) => all.map((one) => getComputedStyle(one).breakInside)"
    kept = page.locator("section, .figure, #wall, tr").evaluate_all(look)
    shown = page.locator("button").evaluate_all("(all) => all.filter((one) => one.offsetHeight > 0).map((one) => one.innerText)")
    findings = page.locator("#finding-list button").all_inner_texts()
    named = page.locator("#verdict p button").all_inner_texts()
    aside = page.evaluate("() => getComputedStyle(document.getElementById('findings')).position")
    page.evaluate("() => dispatchEvent(new Event('afterprint'))")
    page.set_viewport_size({"width": 1440, "height": 1000})
    page.emulate_media(media="screen", color_scheme="light")
    assert (wide, inks, ground) == (0, ["rgb(22, 25, 29)"], "rgb(255, 255, 255)"), (
        "dark on white, and none is wider than the page"
    )
    assert min(names) > 20, "the tree keeps its names"
    assert (set(kept), aside) == ({"avoid"}, "static")
    assert shown == [*named, *findings], "what was found is printed, what could be pressed is not"
    assert len(named) == 1
    assert len(findings) == 3
