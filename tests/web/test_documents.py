"""`nanny tensor --format html` and the page of a diff: self-contained, harmless, drawn in a real browser."""

from __future__ import annotations

import re
from collections import OrderedDict
from html.parser import HTMLParser

import pytest
import torch
from browser import broken_numbers, violations, watched_page
from show.test_chinese import english_in
from torch import nn

import nanny
from nanny.cli import main
from nanny.core.finding import Severity
from nanny.diff.page import render_diff
from nanny.show.translation import translate
from nanny.tensor.page import render_tensor_page

HOSTILE = "</script><img src=x onerror=alert(1)>\"'"


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[dict[str, str | None]] = []
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._inside = tag
        if tag == "script":
            self.scripts.append(dict(attributes))

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        self.text += data if self._inside not in ("script", "style") else ""


class Square(nn.Module):
    def forward(self, x):
        return x * x


def imbalanced() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(32, 64, generator=generator) * torch.logspace(-6, 3, 64)


def overflowing() -> nn.Sequential:
    torch.manual_seed(0)
    layers = {HOSTILE.replace(".", ""): nn.Linear(8, 8), "square": Square(), "head": nn.Linear(8, 2)}
    return nn.Sequential(OrderedDict(layers))


@pytest.fixture(scope="module")
def overflowed() -> nanny.DiffReport:
    return nanny.auto_diff(overflowing(), torch.randn(4, 8) * 3000, torch.float16)


@pytest.fixture(scope="module")
def diff_text(overflowed) -> str:
    return render_diff(overflowed)


def test_a_tensor_page_leads_with_the_verdict_and_has_every_number_of_the_text(tmp_path, capsys):
    torch.save({"w": imbalanced()}, tmp_path / "x.pt")
    page = tmp_path / "x.html"
    code = main(["tensor", f"{tmp_path}/x.pt:w", "--dtype", "fp16", "--tile", "16", "--format", "html", "-o", str(page)])
    assert code == main(["tensor", f"{tmp_path}/x.pt:w", "--dtype", "fp16", "--tile", "16"])
    said = capsys.readouterr().out
    text = Elements(page.read_text(encoding="utf-8")).text
    assert re.search(r"(not safe|risky) in fp16", text.partition("Range")[0])
    codes = re.findall(r"(?:ERROR|WARNING) ([A-Z_]+)", said)
    assert codes
    assert all(code in text for code in codes)
    for section in ("Range", "Resolution", "Dimension 0", "Dimension 1", "Tiles", "Reductions"):
        assert section in text
    for number in re.findall(r"-?\d+\.\d+ bits", said):
        assert number in text


def test_without_a_file_the_page_goes_to_the_screen(tmp_path, capsys):
    torch.save(torch.randn(4, 4), tmp_path / "x.pt")
    assert main(["tensor", str(tmp_path / "x.pt"), "--format", "html"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("<!doctype html>")
    assert out.rstrip().endswith("</html>")


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    torch.save(torch.randn(4, 4), tmp_path / "x.pt")
    assert main(["tensor", str(tmp_path / "x.pt"), "--format", "html", "-o", str(tmp_path / "no" / "where.html")]) == 2
    assert "name another --output FILE" in capsys.readouterr().err


UNUSUAL = {
    "a single value": torch.tensor(3.0),
    "zeros": torch.zeros(4, 4),
    "out of range": torch.full((3, 3), 1e30),
    "with a NaN": torch.tensor([1.0, float("nan")]),
    "one element in four dimensions": torch.ones(1, 1, 1, 1),
}


@pytest.mark.parametrize("tensor", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_tensors_have_a_page_too(tensor):
    text = Elements(render_tensor_page(nanny.analyze_tensor(tensor, "fp16"))).text
    assert "in fp16" in text


def test_pages_run_only_scripts_that_carry_their_nonce(diff_text):
    for text in (diff_text, render_tensor_page(nanny.analyze_tensor(imbalanced(), "bf16", name=HOSTILE))):
        policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
        assert policy is not None
        assert "default-src &#x27;none&#x27;" in policy[1]
        assert "unsafe-inline" not in policy[1].partition("script-src")[2].partition(";")[0]
        (nonce,) = set(re.findall(r"nonce-([\w-]+)", policy[1]))
        scripts = [script for script in Elements(text).scripts if script.get("type") in (None, "text/javascript", "module")]
        assert scripts
        assert {script.get("nonce") for script in scripts} == {nonce}
        assert not [script for script in scripts if "src" in script]


def test_hostile_names_stay_text(diff_text):
    for text in (diff_text, render_tensor_page(nanny.analyze_tensor(imbalanced(), "bf16", name=HOSTILE))):
        page = Elements(text)
        assert "img" not in page.tags
        assert "onerror" in page.text


def test_a_diff_page_names_the_layer_that_overflowed_before_anything_else(diff_text):
    page = Elements(diff_text)
    verdict = page.text.partition("Error through the model")[0]
    assert "not safe in fp16" in verdict
    assert "DIFF_NONFINITE in square" in verdict
    assert "Gradients of parameters" in page.text


def test_the_diff_command_writes_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text("from torch import nn\nmodel = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))\n")
    torch.save(torch.randn(2, 4), "x.pt")
    argv = ["diff", "--model", "m.py:model", "--input", "x.pt", "--dtype", "bf16", "--format", "html", "--output", "d.html"]
    assert main(argv) == 0
    assert "healthy in bf16" in Elements((tmp_path / "d.html").read_text(encoding="utf-8")).text


ALSO_CHINESE = {"dtype", "1 - cos", "ulp p50 / p99", "float16", "float32", "float64", "bfloat16", "int64"}


def test_headings_and_labels_of_both_pages_are_chinese_when_asked():
    report = nanny.auto_diff(overflowing(), torch.randn(4, 8) * 3000, torch.float16, advise=True)
    tensor = nanny.analyze_tensor(imbalanced(), "fp16", tile=16, name=HOSTILE)
    pages = (render_diff(report, "zh"), render_tensor_page(tensor, "zh"))
    for text in pages:
        assert '<html lang="zh">' in text
        labels = re.findall(r"<(?:h1|h2|button|caption)>(.*?)</", text)
        assert len(labels) > 20
        assert [label for label in labels if label not in ALSO_CHINESE and not re.search("[\u4e00-\u9fff]", label)] == []
        assert "onerror" in text
    for finding in (*report.findings, *tensor.findings):
        said = translate(finding.message, "zh")
        assert any(said in Elements(text).text for text in pages), "a finding is said as the catalogue has it"


def test_the_commands_take_the_language_of_the_page_and_say_where_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text("from torch import nn\nmodel = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))\n")
    torch.save(torch.randn(2, 4), "x.pt")
    page = ["--format", "html", "--lang", "zh", "--output"]
    assert main(["tensor", "x.pt", *page, "t.html"]) == 0
    assert main(["diff", "--model", "m.py", "--input", "x.pt", *page, "d.html"]) == 0
    told = capsys.readouterr().err
    for name in ("t.html", "d.html"):
        assert f"nanny: written to {name}" in told
        assert "<h2>结论</h2>" in (tmp_path / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("scheme", "width", "lang"),
    [
        ("dark", 1440, "en"),
        *(pytest.param(*look, marks=pytest.mark.slow) for look in (("light", 390, "zh"), ("dark", 390, "en"))),
    ],
)
def test_the_pages_are_drawn_without_trouble(scheme, width, lang, tmp_path, chromium, overflowed):
    report = nanny.analyze_tensor(imbalanced(), "fp16", tile=16, name=HOSTILE)
    pages = (("tensor.html", render_tensor_page(report, lang), 4), ("diff.html", render_diff(overflowed, lang), 2))
    for name, text, figures in pages:
        (tmp_path / name).write_text(text, encoding="utf-8")
        with watched_page(chromium, color_scheme=scheme, viewport={"width": width, "height": 900}) as watched:
            watched.page.goto((tmp_path / name).as_uri())
            watched.page.locator(".main-svg").first.wait_for()
            assert watched.page.locator(".js-plotly-plot").count() == figures
            assert watched.page.locator("img").count() == 0
            assert violations(watched.page) == []
            assert broken_numbers(watched.page) == []
            assert watched.page.evaluate("() => document.documentElement.scrollWidth") <= width


def deep(width: int = 16, layers: int = 40) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())))


def test_tables_are_sorted_by_a_click_and_sections_fold(tmp_path, chromium, diff_text):
    (tmp_path / "d.html").write_text(diff_text, encoding="utf-8")
    with watched_page(chromium) as watched:
        page = watched.page
        page.goto((tmp_path / "d.html").as_uri())
        watched.drawn()
        table = page.locator("section", has=page.get_by_role("heading", name="module calls")).locator("table")
        head = table.locator("th", has_text="max abs")
        column = "(table) => [...table.tBodies[0].rows].map((row) => row.cells[8].textContent)"
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == "descending"
        falling = table.evaluate(column)
        head.locator("button").click()
        rising = table.evaluate(column)
        known = [float(text) for text in rising if text != "-"]
        assert known == sorted(known)
        assert known
        assert [text for text in falling if text != "-"] == [text for text in rising if text != "-"][::-1]
        assert rising[len(known) :] == ["-"] * (len(rising) - len(known)), "what has no number stays last"
        page.get_by_role("heading", name="module calls").click()
        assert not table.is_visible()


def test_the_culprit_is_named_in_the_chart(tmp_path, chromium, diff_text):
    (tmp_path / "d.html").write_text(diff_text, encoding="utf-8")
    with watched_page(chromium) as watched:
        watched.page.goto((tmp_path / "d.html").as_uri())
        labels = watched.drawn().locator("[data-figure=calls] .annotation-text").all_text_contents()
        assert labels == ["◆ square"]


@pytest.mark.landing
def test_a_healthy_model_and_a_healthy_tensor_take_two_screens_at_most(tmp_path, chromium):
    model = nanny.auto_diff(deep(), torch.randn(4, 16), torch.bfloat16)
    tensor = nanny.analyze_tensor(torch.randn(64, 64), "bf16")
    assert {model.worst or Severity.INFO, tensor.worst or Severity.INFO} == {Severity.INFO}
    for text in (render_diff(model), render_tensor_page(tensor)):
        (tmp_path / "page.html").write_text(text, encoding="utf-8")
        with watched_page(chromium) as watched:
            watched.page.goto((tmp_path / "page.html").as_uri())
            assert watched.drawn().evaluate("() => document.documentElement.scrollHeight / innerHeight") <= 2
            for part in watched.page.locator("summary").all():
                if not part.evaluate("(summary) => summary.parentElement.open"):
                    part.click()
            watched.page.wait_for_function("() => document.querySelectorAll('[data-figure]:not(.js-plotly-plot)').length === 0")


def test_a_tensor_page_draws_how_its_values_lie(tmp_path, chromium):
    report = nanny.analyze_tensor(torch.tensor([1.0, 1.5, 4.0, 0.0]), "fp16")
    assert dict(report.exponents) == {"zero": 1, "0": 2, "2": 1}
    (tmp_path / "t.html").write_text(render_tensor_page(report), encoding="utf-8")
    with watched_page(chromium) as watched:
        watched.page.goto((tmp_path / "t.html").as_uri())
        read = """() => document.querySelector('[data-figure=range]').data.filter((one) => one.yaxis === 'y2')
            .map((one) => [[...one.x], [...one.y]])"""
        ((at, shares),) = watched.drawn().evaluate(read)
        assert dict(zip(at, shares)) == {0.5: pytest.approx(2 / 3), 2.5: pytest.approx(1 / 3)}


@pytest.mark.landing
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_no_sentence_of_another_language_is_on_the_pages(lang, tmp_path, chromium):
    bad = nanny.auto_diff(overflowing(), torch.randn(4, 8) * 3000, torch.float16, advise=True)
    tensor = nanny.analyze_tensor(imbalanced(), "fp16", tile=16)
    for text in (render_diff(bad, lang), render_tensor_page(tensor, lang)):
        (tmp_path / "page.html").write_text(text, encoding="utf-8")
        with watched_page(chromium) as watched:
            watched.page.goto((tmp_path / "page.html").as_uri())
            said = watched.drawn().evaluate(
                """() => { document.querySelectorAll('pre').forEach((part) => part.remove()); return document.body.innerText; }"""
            )
            wrong = [
                line for line in said.splitlines() if (english_in(line) if lang == "zh" else re.search("[\u4e00-\u9fff]", line))
            ]
            assert wrong == []


def test_printed_no_figure_is_split(tmp_path, chromium, diff_text):
    (tmp_path / "d.html").write_text(diff_text, encoding="utf-8")
    with watched_page(chromium) as watched:
        watched.page.goto((tmp_path / "d.html").as_uri())
        page = watched.drawn()
        page.emulate_media(media="print")
        kept = page.evaluate(
            "() => [...document.querySelectorAll('.figure, tr')].map((part) => getComputedStyle(part).breakInside)"
        )
        assert set(kept) == {"avoid"}
        assert page.locator("th button").first.is_visible(), "the names of columns are printed"
