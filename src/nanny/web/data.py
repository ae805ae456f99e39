"""All that the page shows of a run, as plain data that JSON can hold; bounded, however long the run.

    page_data(path, run=None, compare=None)  -> the whole page; `nanny report` embeds it, `nanny ui` serves it as /api/page
    changes_since(path, run, step)           -> what is new after a step, below 100 kB; /api/changes?since=STEP
    layer_data(path, run, kind, site)        -> exponent histogram of one layer; /api/histogram?kind=KIND&site=NAME
    whatif_data(path, run)                   -> the run imagined in other formats; /api/whatif

Everything that one of these returns is of one moment. `live=True` leaves out what takes long or much room: the live page asks
for one layer's histogram at a time, and for the what-if when the rest is drawn. Arrays are deflated typed arrays, see
`arrays.pack_array`; numbers that JSON has no word for are strings, see `core.plain_json.finite`.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from ..core.command_line import LANGUAGES
from ..core.cost import cost_text
from ..core.finding import Finding, NannyError, Severity
from ..core.formats import TARGETS, format_of
from ..core.numbers import number
from ..core.plain_json import finite
from ..core.terminal import progress, visible
from ..diagnose import knowledge
from ..diagnose.text import BLAME, render_markdown
from ..diagnose.trials import trial_in_words
from ..diagnose.verdict import Verdict, certainty
from ..runs.alerts import findings_of, job_verdict, repeats
from ..runs.card import cards, outlook_texts
from ..runs.compare import compare_runs, ratio_matrix
from ..runs.histograms import histograms_of, layer_histogram
from ..runs.matrices import KindMatrices, error_matrix, matrices_of
from ..runs.opening import open_job, open_named
from ..runs.source import Source
from ..runs.summary import Summary, summarize
from ..runs.text.compare import comparison_lines
from ..runs.text.summary import next_commands
from ..runs.text.what_if import how_it_died, what_if_reasons, what_if_remarks, what_if_verdict
from ..runs.wall import Wall, wall_of
from ..runs.what_if import judge_in_format
from ..show.translation import translate
from ..store import reader
from .arrays import codes_of, pack_array, pack_columns, pack_curve, pack_histograms, pack_kind, pack_matrix
from .figures import format_borders, page_figures

CURVES = ("loss", "grad_norm", "lr", "scale", "skipped", "unchanged_share", "update_ratio", "step_ms")
MOST_GROUPS = 1500  # of points of a curve
MOST_FINDINGS = 600
MOST_TEXT = 2000  # characters of a name or message
MOST_PASSED_ON = 40
WHATIF_SAMPLES = 4_000_000  # sites x samples, and
WHATIF_HISTOGRAMS = 400_000  # sites x histograms, up to which the what-if is worked out for the page
CHANGE_BYTES = 95_000
CHANGE_CELLS = 24_000
CHANGE_POINTS = 120
CHANGE_FINDINGS = 40
LOOK_BACK = 50  # steps: findings may come a little late
MOST_PARTED = 200
MOST_RANKS = 256
MOST_MARKS = 200  # of one rank


class PageData(TypedDict):
    """Everything on the page."""

    run: dict[str, Any]
    verdict: dict[str, Any]
    steps: dict[str, int] | None
    findings: list[dict[str, Any]]
    findings_left_out: int
    curves: dict[str, Any]
    kinds: dict[str, Any]
    histograms: dict[str, Any]
    diagnoses: list[dict[str, Any]]
    whatif: dict[str, Any]
    comparison: dict[str, Any] | None
    figures: dict[str, Any]
    formats: list[dict[str, Any]]
    card: dict[str, str]
    outlook: dict[str, list[tuple[str, str]]]
    focus: dict[str, Any]
    next: list[str]
    notes: list[str]
    zh: dict[str, str]
    ranks: list[dict[str, Any]]


def page_data(path: str | Path | None, run: int | None = None, compare: str | None = None, *, live: bool = False) -> PageData:
    """The whole page; `compare` is the reference run: a number in the same store, or a path as `nanny compare` takes it."""
    db = None if path is None else str(path)
    with open_job(db, run) as (sources, notes):
        summary = summarize(sources, notes)
        source = summary.culprit_rank.source
        found, left_out = _worst_findings(summary.findings, MOST_FINDINGS)
        curves = _curves(source)
        matrices = matrices_of(source)
        kinds, histograms = _layers(source, matrices, shares=not live)
        comparison = None if compare is None else _comparison(db, compare, sources, source, kinds, shares=not live)
        wall = wall_of(summary, matrices)
        diagnoses, whatif = _diagnoses(summary), {} if live else _what_if(source, summary.verdict)
        return PageData(
            run=_run_data(source),
            verdict=_verdict(summary),
            steps=_steps(summary),
            findings=found,
            findings_left_out=left_out,
            curves=curves,
            kinds=kinds,
            histograms=histograms,
            diagnoses=diagnoses,
            whatif=whatif,
            comparison=comparison,
            figures=page_figures(curves, comparison["curves"] if comparison else ()),
            formats=format_borders(),
            card=cards(summary, wall),
            outlook=outlook_texts(wall),
            focus=_focus(summary, wall),
            next=next_commands(summary, on_page=True),
            notes=summary.notes,
            ranks=_ranks(summary),
            zh=_in_chinese(found, summary, (comparison or {}).get("lines", ())),
        )


def _focus(summary: Summary, wall: Wall) -> dict[str, Any]:
    """Where the page opens and `show` leads: the culprit of the verdict, as the picture at its head draws it."""
    step = wall.impact if summary.diagnosis is None else summary.diagnosis.step
    one, first = summary.diagnosis, summary.culprit
    culprit = one.culprit if one is not None else first.site if first is not None else ""
    own = bool(wall.site) and any(f"{a}.".startswith(f"{b}.") for a, b in ((wall.site, culprit), (culprit, wall.site)) if b)
    where = {"step": step, "kind": wall.kind or None, "site": _cut(wall.site) or None, "own": own}
    said = "" if wall.expected is None else number(wall.expected)
    return finite({**where, "format": wall.format, "op": wall.op, "expected": wall.expected, "said": said})


def _in_chinese(found: Sequence[Mapping[str, Any]], summary: Summary, more: Sequence[str] = ()) -> dict[str, str]:
    """Everything that is said on the page as a sentence -> the same in Chinese, by the one catalogue."""
    said = [text for finding in found for text in (finding["message"], finding.get("hint", ""))]
    said += [summary.verdict.reason, *summary.notes, *more]
    out = _chinese_of(said)
    one = summary.diagnosis
    if one is not None:
        chinese = one.in_language("zh")
        out |= dict(zip((*one.evidence, *one.chain), (*chinese.evidence, *chinese.chain)))
        out |= {one.remedy: chinese.remedy, one.confirm: chinese.confirm}
    return out


def _chinese_of(said: Iterable[str]) -> dict[str, str]:
    return {text: chinese for text in said if (chinese := translate(text, "zh")) != text}


def _ranks(summary: Summary) -> list[dict[str, Any]]:
    """Of a job of several processes: when each of them found what; the page shows them as rows over the steps."""
    if len(summary.ranks) < 2:
        return []
    out = []
    for state in summary.ranks[:MOST_RANKS]:
        marks = {f.step: f.severity for f in sorted(state.findings, key=lambda f: f.severity) if f.step is not None}
        worst = sorted(marks, key=lambda step: (-marks[step], step))[:MOST_MARKS]
        run = state.source.run
        found = [[step, marks[step].name.lower()] for step in sorted(worst) if marks[step] > Severity.INFO]
        out.append({"rank": run.rank, "file": state.source.path.name, "run": run.id, "marks": found})
    return out


def _steps(summary: Summary) -> dict[str, int] | None:
    steps = summary.lead.steps
    return None if steps is None else {"first": steps[0], "last": steps[1]}


def _curves(source: Source, after: int | None = None, most_groups: int = MOST_GROUPS) -> dict[str, Any]:
    """Name -> steps and values; of skipped steps only those that were."""
    out = {}
    for name in CURVES:
        steps, values = source.evidence.curve(name)  # read already, for the verdict
        late = steps > (-1 if after is None else after)
        kept = late & (values > 0) if name == "skipped" else late
        if not late.any():
            continue
        out[name] = pack_curve(steps[kept], values[kept], most_groups)
    return out


def _layers(source: Source, found: Mapping[str, KindMatrices], shares: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The matrices of each kind of site, and its histograms (`shares`: with the values of all sites, not the columns alone).

    Quantities that were taken at fewer steps than the rest of their kind have columns of their own.
    """
    kinds = {
        kind: {
            "names": [_cut(site.name) for site in matrices.sites],
            "dtypes": [site.dtype for site in matrices.sites],
            **pack_kind(matrices),
        }
        for kind, matrices in found.items()
    }
    histograms = {}
    for kind, of_kind in histograms_of(source).items():
        spec = histograms[kind] = pack_histograms(of_kind)
        if not shares:
            del spec["shares"]
        for name, matrix in of_kind.flushed.items():
            if kind in kinds:
                kinds[kind]["quantities"][name] = {**pack_matrix(matrix), **pack_columns(matrix.columns)}
    errors = error_matrix(source, [site.name for site in found["grad"].sites]) if "grad" in found else None
    if errors is not None:
        kinds["grad"]["quantities"]["error"] = {**pack_matrix(errors), **pack_columns(errors.columns)}
    return kinds, histograms


def _diagnoses(summary: Summary) -> list[dict[str, Any]]:
    one = summary.diagnosis
    if one is None:
        return []
    tried = {lang: [trial_in_words(t, lang) for t in one.tried] for lang in LANGUAGES}
    facts = {lang: [translate(text, lang) for text in (BLAME[one.precision_caused], certainty(one))] for lang in LANGUAGES}
    markdown = {lang: render_markdown(summary.verdict, one.in_language(lang), language=lang) for lang in LANGUAGES}
    return [{**finite(one.to_json()), "tried": tried, "facts": facts, "pages": _cause_pages(one.cause), "markdown": markdown}]


def _cause_pages(cause: str) -> dict[str, Any]:
    """What the knowledge base says about a cause, in each language it has."""
    out = {}
    for language, sections in knowledge.SECTIONS.items():
        page = knowledge.causes(language).get(cause)
        if page is not None:
            out[language] = {
                "title": page.title,
                "mechanism": page.sections().get(sections[0], ""),
                "repaired": page.programs()[-1] if page.programs() else "",
            }
    return out


def changes_since(path: str | Path | None, run: int | None, step: int) -> dict[str, Any]:
    """What came after `step`, pooled to stay small; `{"reload": True}` where that is not possible."""
    with open_job(None if path is None else str(path), run) as (sources, notes):
        summary = summarize(sources, notes)
        source = summary.culprit_rank.source
        found = summary.findings
        recent = [_finding(f) for f in found if f.step is None or f.step > step - LOOK_BACK][-CHANGE_FINDINGS:]
        out = {
            "run": _run_data(source),
            "verdict": _verdict(summary),
            "steps": _steps(summary),
            "findings": recent,
            "zh": _in_chinese(recent, summary),
            "findings_total": len(found),
            "curves": _curves(source, step, CHANGE_POINTS),
            "kinds": {kind: pack_kind(found) for kind, found in matrices_of(source, step, CHANGE_CELLS).items()},
            "sites": {kind: len(source.sites(kind)) for kind in reader.kinds(source.db, source.run.id)},
        }
    small = len(json.dumps(finite(out))) <= CHANGE_BYTES
    return out if small else {"reload": True}


def layer_data(path: str | Path | None, run: int | None, kind: str, site: str, of: str | None = None) -> dict[str, Any] | None:
    """Histograms of one layer over time; None where there are none. `of` is another run, as `compare` of the page names it."""
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(_open_shown(path, run))
        if of is not None:
            source = stack.enter_context(open_named(of, None if path is None else str(path), beside=[source]))[0]
        found = layer_histogram(source, kind, site)
        if found is None:
            return None
        flushed = {name: pack_array(codes_of(matrix.keys)) for name, matrix in found.flushed.items()}
        return {**pack_histograms(found), "flushed": flushed}


def whatif_data(path: str | Path | None, run: int | None) -> dict[str, Any]:
    """What FP16, BF16 and FP8 would have done to the run."""
    with _open_shown(path, run) as source:
        return _what_if(source, job_verdict([source], findings_of(source)))


@contextlib.contextmanager
def _open_shown(path: str | Path | None, run: int | None) -> Iterator[Source]:
    """The process that the curves and layers are of: the first, unless the culprit was seen on another."""
    with open_job(None if path is None else str(path), run) as (sources, _):
        yield sources[0] if len(sources) == 1 else summarize(sources).culprit_rank.source


def _run_data(source: Source) -> dict[str, Any]:
    run = source.run
    meta = {key: run.meta[key] for key in ("exception", "failure") if key in run.meta}
    return {
        "id": run.id,
        "file": str(source.path),
        "command": _cut(shlex.join(run.argv)),
        "rank": run.rank,
        "world_size": run.world_size,
        "status": run.status,
        "amp_dtype": run.amp_dtype,
        "torch": run.torch,
        "started": run.started,
        "finished": run.finished,
        "dropped": run.dropped,
        "flags": source.flags,
        "cost": {lang: translate(cost_text(run.meta), lang) for lang in ("en", "zh")},
        **finite(meta),
    }


def _verdict(summary: Summary) -> dict[str, Any]:
    """Without the culprit itself: it is the finding that has `culprit` set."""
    culprit, verdict = summary.culprit, summary.verdict
    key = None if culprit is None else [culprit.step, culprit.code, _cut(culprit.site), culprit.rank]
    words = {"text": verdict.text, "word": verdict.word, "reason": verdict.reason}
    return {"healthy": verdict.healthy, **words, "counts": summary.counts, "culprit": key, "rank": verdict.rank}


def _worst_findings(findings: Sequence[Finding], most: int) -> tuple[list[dict[str, Any]], int]:
    """The worst, and the earliest among them, in the order of their steps; and how many are left out."""
    ranked = sorted(range(len(findings)), key=lambda i: (-findings[i].severity, i))[:most]
    return [_finding(findings[i]) for i in sorted(ranked)], max(len(findings) - most, 0)


def _finding(finding: Finding) -> dict[str, Any]:
    passed_on = [_cut(str(site)) for site in finding.evidence.get("passed_on", ())]
    out = {
        "step": finding.step,
        "severity": finding.severity.name.lower(),
        "code": finding.code,
        "site": _cut(finding.site),
        "message": _sentence(finding.message),
        "hint": _sentence(finding.hint),
        "rank": finding.rank,
        "where": f"{finding.file}:{finding.line}" if finding.file else "",
        "value": finding.value,
        "limit": finding.limit,
        "times": repeats(finding),
        "last_step": finding.evidence.get("last_step"),
        "passed_on": passed_on[:MOST_PASSED_ON],
        "passed_on_total": len(passed_on),
    }
    kept = {key: value for key, value in out.items() if value not in (None, "", [], 0) or key in ("step", "site")}
    kept |= {} if finding.rank is None else {"rank": finding.rank}  # the first has number 0
    return dict(finite(kept))


def _cut(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…"


def _sentence(text: str) -> str:
    """With marks in place of control characters: a name that turns the direction of writing would turn the rest with it."""
    return _cut(visible(text.replace("\n", " ")))


def _what_if(source: Source, verdict: Verdict) -> dict[str, Any]:
    """The verdict for each format, or why there is none."""
    if _is_long(source):
        return {"note": "long", "command": source.command("whatif", "--dtype", "fp16"), "formats": []}
    formats: list[dict[str, Any]] = []
    died = ""
    for target in TARGETS:
        progress(f"whatif {target}")
        try:
            result = judge_in_format(source, format_of(target), verdict=verdict)
        except NannyError as error:
            return {"note": str(error), "command": "", "formats": [], "zh": _chinese_of([str(error)])}
        died = how_it_died(result)
        formats.append(
            finite(
                {
                    "dtype": target,
                    "survives": result.survives is not False,
                    "with_losses": result.survives is None,
                    "unknown": result.unknown,
                    "verdict": what_if_verdict(result),
                    "reasons": [_sentence(reason) for reason in what_if_reasons(result)],
                    "remarks": [_cut(remark) for remark in what_if_remarks(result, curves=False)],  # the page has better ones
                    "own": result.own_format,
                    "broken": result.broken_from is not None and result.sick is None,
                    "best_scale": 2.0**result.path.best_bits if result.path and result.survives is not False else None,
                    "skip_rate": result.path.skip_rate if result.path else None,
                    "worst": _cut(result.outcomes[0].site) if result.outcomes else "",
                }
            )
        )
    said = [text for one in formats for text in (one["verdict"], *one["reasons"], *one["remarks"])]
    return {"note": died, "command": "", "formats": formats, "zh": _chinese_of([died, *said])}


def _is_long(source: Source) -> bool:
    samples = histograms = 0
    for kind in reader.kinds(source.db, source.run.id):
        sites = len(source.sites(kind))
        samples += sites * len(reader.sample_steps(source.db, source.run.id, kind))
        histograms += sites * len(reader.histogram_steps(source.db, source.run.id, kind))
    return samples > WHATIF_SAMPLES or histograms > WHATIF_HISTOGRAMS


def _comparison(
    db: str | None, other: str, job: Sequence[Source], shown: Source, kinds: dict[str, Any], shares: bool
) -> dict[str, Any]:
    """Where the run that is shown parts from the other, which is the reference; the other's curves and histograms, and the
    ratio of both as one more quantity of each kind of layer."""
    with open_named(other, db, beside=job) as all_of_it:
        reference = all_of_it[0]
        result = compare_runs(all_of_it, job)
        for kind, spec in kinds.items():
            ratio = ratio_matrix(reference, shown, kind)
            if ratio is not None:
                spec["quantities"]["ratio"] = {**pack_matrix(ratio), **pack_columns(ratio.columns)}
        parted = [series for series in result.layers if series.step is not None]
        return {
            "other": _run_data(reference),
            "curves": _curves(reference),
            "histograms": _other_histograms(reference) if shares else {},
            "lines": [line.text for line in comparison_lines(result) if line.text],
            "parts": result.first is not None,
            "for_good": result.for_good,
            "first": None if result.first is None else finite(vars(result.first)),
            "curves_part": finite([vars(curve) for curve in result.curves]),
            "layers": finite([vars(series) for series in parted[:MOST_PARTED]]),
            "layers_parted": len(parted),
            "layers_total": len(result.layers),
            "notes": result.notes,
        }


def _other_histograms(reference: Source) -> dict[str, Any]:
    found = histograms_of(reference)
    sites = {kind: reference.sites(kind) for kind in found}
    return {kind: {**pack_histograms(one), "names": [_cut(site.name) for site in sites[kind]]} for kind, one in found.items()}
