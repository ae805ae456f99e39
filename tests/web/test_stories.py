"""A run of each kind tells one story: the end of `nanny run`, terminal, card, notebook and page, in both languages."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from browser import broken_numbers, cut_texts, violations, watched_page
from runs.query_recordings import nanny
from show.test_chinese import english_in

from nanny.agent.folder import ReadableFolder
from nanny.agent.tools import Tools
from nanny.diagnose.knowledge import causes
from nanny.runs.card import card_svg
from nanny.runs.opening import open_job
from nanny.runs.summary import summarize
from nanny.web.report import write_report

EXAMPLES = Path(__file__).parents[2] / "examples"


class Kind(NamedTuple):
    example: str
    cause: str
    drawn: str  # what only the picture of this kind has


KINDS = {
    "overflow": Kind("unscaled_attention", "attention_logit_overflow_fp16", "FP32 has"),
    "silent overflow": Kind("squared_norm", "norm_square_overflow_fp16", "sum in FP32"),
    "underflow": Kind("vanishing_gradients", "grad_underflow_no_scaling", "in FP32 9.3e-8 (rms)"),
    "stagnation": Kind("lost_updates", "update_lost", "updates of 3.12e-5"),
    "learning rate": Kind("learning_rate", "lr_too_high", "weights of"),
    "data": Kind("bad_record", "data_nan", "loss not finite"),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in KINDS if name != "stagnation"]


def recorded(example: str, folder: Path, *arguments: str) -> str:
    """What the end of `nanny run` says."""
    script = shutil.copy(EXAMPLES / f"{example}.py", folder)
    done = nanny("run", Path(script).name, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def plain(svg: str) -> str:
    """Its words in a row, wherever a line of the picture ends."""
    return " ".join(html.unescape(re.sub("<[^>]+>", " ", re.sub("<style>.*?</style>", "", svg, flags=re.DOTALL))).split())


def written_alike(card: str, said: str) -> bool:
    """The number of the picture, wherever a diagnosis gives it, is the same to the last digit: not 65,957 and then 6.6e4."""
    drawn = re.search(r"FP32 has ([\d,]+)", card)
    if drawn is None:
        return True
    given = re.findall(r"(?:reaches|gives) (\d[\d,.]*(?:e[+-]?\d+)?)(?: in FP32)?, beyond", said)
    return set(given) == {drawn.group(1)}


def words_of(page: Any) -> str:
    """What the page says: without source code, commands and names that nobody translates."""
    script = """() => { const shown = document.querySelector('main').cloneNode(true);
        shown.querySelectorAll('pre, code, .site, .commands, .figure, canvas, input').forEach((part) => part.remove());
        return shown.innerText; }"""
    return str(page.evaluate(script))


@pytest.mark.landing
@pytest.mark.parametrize("name", ["stagnation", *SLOW])
def test_every_screen_names_the_same_cause_place_step_and_remedy(name, tmp_path, monkeypatch, chromium):
    kind = KINDS[name]
    told = recorded(kind.example, tmp_path)
    monkeypatch.chdir(tmp_path)
    with open_job(None, None) as (sources, notes):
        summary = summarize(sources, notes)
        one = summary.diagnosis
        assert one is not None
        assert one.cause == kind.cause
        card, shown = plain(card_svg(summary)), plain(one._repr_html_() or "")
        told_to_agents = Tools(ReadableFolder(tmp_path)).diagnose()
    assert [(found.cause, found.culprit, found.step, found.remedy) for found in told_to_agents.diagnoses] == [
        (one.cause, one.culprit, one.step, one.remedy)
    ]
    listed = Tools(ReadableFolder(tmp_path)).findings()
    assert f"nanny: {summary.verdict.text}" in told, "the live log ends with the verdict"
    (row,) = json.loads(nanny("runs", "--format", "json", cwd=tmp_path).stdout)["runs"]
    (given,) = Tools(ReadableFolder(tmp_path)).list_runs().runs
    assert {row["verdict"], given.verdict} == {summary.verdict.text}, "also where nothing was found on the way"
    assert (row["cause"], row["healthy"]) == (one.cause, False)
    assert listed.verdict == summary.verdict.text
    assert listed.total == sum(summary.counts.values()), "the diagnosis is the verdict, and not one finding more"
    said = list(listed.findings)
    if one.culprit in {found.site for found in said}:
        said += Tools(ReadableFolder(tmp_path)).layer_history(one.culprit).findings
    later = [found for found in said if found.step is not None and one.step is not None and found.step >= one.step]
    assert {found.hint for found in later} <= {""}, "what to change is said once"
    assert re.search(r"cost: [\d.]+ (s of the run's [\d.]+ s|% of the training time)", told)
    title, place = causes("en")[one.cause].title.rstrip("."), f"step {one.step}"
    asked = nanny("summary", cwd=tmp_path).stdout
    if name == "stagnation":  # of six kinds one: matplotlib is slow to start
        nanny("plot", "--what", "loss", "--format", "svg", "-o", ".", cwd=tmp_path)
        assert f"{one.cause} at {place} in {one.culprit} (dashed)" in html.unescape((tmp_path / "loss.svg").read_text())
    for screen in (told, asked, nanny("diagnose", cwd=tmp_path).stdout, shown):
        flat = " ".join(screen.split())
        assert {fact for fact in (one.cause, one.culprit, place) if fact not in flat} == set()
        assert one.remedy.split(",")[0].rstrip(".") in flat
        assert written_alike(card, flat)
        assert name != "data" or "the batch holds NaN" in flat, "and no operation made it"
    assert asked.startswith("NOT HEALTHY")
    assert (tmp_path / "nanny_logs" / "run-1.svg").is_file()
    assert {fact for fact in (title, one.culprit, place, kind.drawn) if fact not in card} == set()

    write_report(tmp_path / "report.html")
    with watched_page(chromium) as watched:
        watched.page.goto((tmp_path / "report.html").as_uri())
        page = watched.drawn()
        verdict = page.locator("#verdict").inner_text()
        assert {fact for fact in ("NOT HEALTHY", title, one.culprit, place) if fact not in verdict} == set()
        assert violations(page) == []
        assert one.remedy.replace("`", "").rstrip(".") in verdict
        assert page.evaluate("() => [state.step, page.focus.step]") == [one.step, one.step]
        focus = page.evaluate("() => [page.focus.step, page.focus.kind, page.focus.site]")
        page.evaluate("() => update({ step: 1, site: Object.values(page.kinds)[0].names.at(-1), finding: null })")
        page.get_by_role("button", name="Show in the plots").click()
        assert page.evaluate("() => [state.step, state.kind, state.site]") == focus
        marks = page.locator("#tree-space .tree-row.born").all_inner_texts()
        own = one.culprit == focus[2] or one.culprit.startswith(f"{focus[2]}.") or focus[2].startswith(f"{one.culprit}.")
        expected = place if own else "first seen here"
        assert all(expected in mark for mark in marks), "the tree marks the culprit at its step, and blames no other"
        told_of_place = page.evaluate("async () => { await describePlace(); return document.getElementById('place').innerText; }")
        assert name != "underflow" or "flushed to zero" not in told_of_place, "what is 0 already has nothing left to lose"
        if name == "overflow":
            around = page.evaluate("() => newTreeRow(tree.culprit.parent).querySelector('.roomy').textContent")
            assert around == f"from {place} on", "what holds the culprit is not better off than it"
            # the number that the verdict is about stands in the plot, as the card has it
            labels = page.evaluate("() => document.getElementById('histogram-figure').layout.annotations.map((one) => one.text)")
            number = re.search(r"FP32 has ([\d,]+)", card).group(1)  # type: ignore[union-attr]
            assert f"bmm in FP32: {number}" in labels
        board = "{ value: { writeText: (text) => (window.copied = text) } }"
        page.evaluate(f"() => Object.defineProperty(navigator, 'clipboard', {board})")
        page.click("#markdown")
        assert {fact for fact in (one.cause, one.culprit) if fact not in page.evaluate("() => window.copied")} == set()
        assert "✓" not in page.locator("#whatif").inner_text(), "nothing is green after a run that went wrong"
        assert name != "data" or "not known" not in page.locator("#whatif").inner_text(), "no format mends a bad batch"
        assert name != "silent overflow" or "told by the diagnosis" in page.locator("#findings").inner_text()
        page.click("#language")
        page.wait_for_function("() => document.documentElement.lang === 'zh'")
        page.set_viewport_size({"width": 390, "height": 844})
        assert violations(page) == [], "on a phone more of it scrolls"
        assert causes("zh")[one.cause].title.rstrip("。.") in page.locator("h1").inner_text()
        assert [line for line in words_of(page).splitlines() if english_in(line)] == []
    with watched_page(chromium, viewport={"width": 390, "height": 844}, color_scheme="dark") as watched:
        watched.page.goto((tmp_path / "report.html").as_uri())
        page = watched.drawn()
        assert (broken_numbers(page), cut_texts(page)) == ([], [])
        left = "(texts) => texts.map((one) => one.getBoundingClientRect().left)"
        (plot,) = page.locator("#histogram-figure .nsewdrag").first.evaluate_all(left)
        assert min(page.locator("#histogram-figure .annotation-text").evaluate_all(left)) > plot, "no word over the numbers"
        assert violations(page) == []


@pytest.mark.slow
def test_a_healthy_run_says_how_much_room_it_had_and_is_green_in_its_own_format(tmp_path, monkeypatch, chromium):
    recorded("unscaled_attention", tmp_path, "--fixed")
    monkeypatch.chdir(tmp_path)
    with open_job(None, None) as (sources, notes):
        assert "bits below the end of fp16" in plain(card_svg(summarize(sources, notes)))
    write_report(tmp_path / "report.html")
    with watched_page(chromium) as watched:
        watched.page.goto((tmp_path / "report.html").as_uri())
        page = watched.drawn()
        assert page.locator("h1").inner_text().startswith("✓ HEALTHY")
        assert violations(page) == []
        assert "bits below the end of fp16" in page.locator("#wall").inner_text()
        assert "This FP16 run SURVIVED in FP16." in page.locator("#whatif").inner_text()
        page.click("#language")
        assert [line for line in words_of(page).splitlines() if english_in(line)] == []


@pytest.mark.slow
def test_a_run_in_bf16_without_autocast_is_asked_about_bf16_and_beside_its_reference(tmp_path, monkeypatch, chromium):
    recorded("lost_updates", tmp_path, "--fixed")
    recorded("lost_updates", tmp_path)
    monkeypatch.chdir(tmp_path)
    write_report(tmp_path / "report.html", compare="1")
    told = nanny("compare", "1", "2", cwd=tmp_path).stdout.splitlines()[0]
    assert Tools(ReadableFolder(tmp_path)).compare_runs(1, 2).verdict == told
    with watched_page(chromium) as watched:
        watched.page.goto((tmp_path / "report.html").as_uri())
        page = watched.drawn()
        assert page.evaluate("() => state.format") == "bf16"
        assert page.locator("#comparison h2").inner_text() == "Beside run 1 (A; this run is B)"
        assert told == page.locator("#comparison p").first.inner_text()
        assert told in page.locator("#verdict").inner_text(), "the same words at the head"
        assert violations(page) == []
        assert page.evaluate("() => quantitiesOf(state.kind).includes('ratio')")
        rows = page.locator("#whatif tbody tr").all_inner_texts()
        assert "✕" in next(row for row in rows if row.startswith("BF16"))
        page.click("#language")
        assert [line for line in words_of(page).splitlines() if english_in(line)] == []


@pytest.mark.slow
def test_two_processes_tell_one_story_and_name_the_rank_that_began_it(tmp_path, monkeypatch, chromium):
    shutil.copy(EXAMPLES / "ddp.py", tmp_path)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "nanny", "run", "ddp.py")
    done = subprocess.run([sys.executable, *launch], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    monkeypatch.chdir(tmp_path)
    with open_job(None, None) as (sources, notes):
        summary = summarize(sources, notes)
        card = plain(card_svg(summary))
    one = summary.diagnosis
    assert one is not None
    assert (one.cause, one.culprit, one.step, summary.verdict.rank) == ("data_nan", "data:input", 40, 1)
    place = "step 40", "rank 1", one.cause, one.culprit
    asked = [nanny(command, cwd=tmp_path).stdout for command in ("summary", "diagnose", "alerts")]
    for screen in (done.stdout + done.stderr, *asked, card):
        assert {fact for fact in place if fact not in screen} == set()
    assert f"all 2 ranks: {summary.verdict.text}" in done.stdout + done.stderr
    assert "--db nanny_logs/metrics.rank1.db" in asked[2], "what to type next leads to the rank that began it"
    assert Tools(ReadableFolder(tmp_path)).run_summary().verdict == summary.verdict.text
    write_report(tmp_path / "report.html")
    with watched_page(chromium) as watched:
        watched.page.goto((tmp_path / "report.html").as_uri())
        page = watched.drawn()
        verdict = page.locator("#verdict").inner_text()
        assert {fact for fact in ("data:input", "step 40", "rank 1") if fact not in verdict} == set()
        assert [row.split("\n")[0] for row in page.locator("#ranks .rank").all_inner_texts()] == ["rank 0", "rank 1 ◆ the first"]
        assert page.evaluate("() => [state.step, page.run.rank]") == [40, 1]
        assert violations(page) == []
        page.click("#language")
        assert [line for line in words_of(page).splitlines() if english_in(line)] == []
