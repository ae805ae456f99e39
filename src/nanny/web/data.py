"""All that the page shows of a run, as plain data that JSON can hold; bounded, however long the run.

    page_data(path, run=None, compare=None)  -> the whole page; `nanny report` embeds it, `nanny ui` serves it as /api/page
    changes_since(path, run, step)           -> what is new after a step, below 100 kB; /api/changes?since=STEP
    layer_data(path, run, kind, site)        -> exponent histogram of one layer; /api/histogram?kind=KIND&site=NAME
    whatif_data(path, run)                   -> the run imagined in other formats; /api/whatif

`live=True` leaves out what takes long or much room: the live page asks for one layer's histogram at a time, and for the what-if
when the rest is drawn. Arrays are deflated typed arrays, see `arrays.packed`; numbers that JSON has no word for are strings, see
`show.jsontext.finite`.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

from ..core.finding import Finding, NannyError
from ..core.formats import TARGETS
from ..core.plain_json import finite
from ..diagnose import knowledge
from ..diagnose.run import diagnose
from ..runs.alerts import findings_of, in_order, repeats
from ..runs.command import ask
from ..runs.source import Source, open_job, open_run
from ..show.findings import visible
from ..store import reader
from .curves import curves_of
from .exponents import histograms_of, layer_histogram
from .figures import format_borders, page_figures
from .matrices import error_matrix, matrices_of

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
MOST_DIAGNOSES = 5
DIED = " Of what came before: "
_CURVE = re.compile("[\u2580-\u259f]|over time:$")  # a sparkline and its title: the page has better curves


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
    next: list[str]
    notes: list[str]


def page_data(path: str | Path | None, run: int | None = None, compare: str | None = None, *, live: bool = False) -> PageData:
    """The whole page; `compare` is the reference run: a number in the same store, or a path as `nanny compare` takes it."""
    db = None if path is None else str(path)
    summary, next_commands = _summary(db, run)
    with open_job(db, run) as (sources, notes):
        source = _first_sick(sources, summary["culprit"])
        found, left_out = _bounded(in_order([f for member in sources for f in findings_of(member)]), MOST_FINDINGS)
        out = PageData(
            run=_run_data(source),
            verdict=_verdict(summary),
            steps=summary["steps"],
            findings=found,
            findings_left_out=left_out,
            curves=curves_of(source),
            kinds=matrices_of(source),
            histograms=histograms_of(source, all_shares=not live),
            diagnoses=_diagnoses(source),
            whatif={} if live else _whatif(source),
            comparison=None,
            figures={},
            formats=format_borders(),
            next=next_commands,
            notes=[*notes, *map(str, summary["notes"])],
        )
        _add_own_columns(out["kinds"], out["histograms"], source)
        for spec in out["kinds"].values():
            spec["names"] = [_cut(name) for name in spec["names"]]
    if compare is not None:
        this = str(source.run.id) if source is sources[0] else f"{source.path}:{source.run.id}"
        out["comparison"] = _comparison(db, compare, this)
    others = out["comparison"]["curves"] if out["comparison"] else ()
    out["figures"] = page_figures(out["curves"], others)
    return out


def _add_own_columns(kinds: dict[str, Any], histograms: dict[str, Any], source: Source) -> None:
    """Quantities that were taken at fewer steps than the rest of their kind, with columns of their own."""
    for kind, spec in histograms.items():
        columns = {name: spec[name] for name in ("steps", "bounds", "reach")}
        for name, codes in spec.pop("flushed").items():
            if kind in kinds:
                kinds[kind]["quantities"][name] = {"codes": codes, "at": None, **columns}
    errors = error_matrix(source, kinds["grad"]["names"]) if "grad" in kinds else None
    if errors is not None:
        kinds["grad"]["quantities"]["error"] = errors


def _first_sick(sources: Sequence[Source], culprit: dict[str, Any] | None) -> Source:
    """The rank that the culprit was seen on."""
    rank = None if culprit is None else culprit.get("rank")
    return next((source for source in sources if source.run.rank == rank), sources[0])


def _diagnoses(source: Source) -> list[dict[str, Any]]:
    found = diagnose(source.path, source.run.id)[:MOST_DIAGNOSES]
    return [{**finite(diagnosis.to_json()), "pages": _cause_pages(diagnosis.cause)} for diagnosis in found]


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
    db = None if path is None else str(path)
    summary, _ = _summary(db, run)
    with open_job(db, run) as (sources, _):
        source = _first_sick(sources, summary["culprit"])
        found = in_order([f for member in sources for f in findings_of(member)])
        recent = [f for f in found if f.step is None or f.step > step - LOOK_BACK]
        out = {
            "run": _run_data(source),
            "verdict": _verdict(summary),
            "steps": summary["steps"],
            "findings": [_finding(f) for f in recent[-CHANGE_FINDINGS:]],
            "findings_total": len(found),
            "curves": curves_of(source, step, CHANGE_POINTS),
            "kinds": matrices_of(source, step, CHANGE_CELLS),
            "sites": {kind: len(reader.sites(source.db, source.run.id, kind)) for kind in reader.kinds(source.db, source.run.id)},
        }
    for kind in out["kinds"].values():
        del kind["names"], kind["dtypes"]
    small = len(json.dumps(finite(out))) <= CHANGE_BYTES
    return out if small else {"reload": True}


def layer_data(path: str | Path | None, run: int | None, kind: str, site: str) -> dict[str, Any] | None:
    """Histograms of one layer over time; None where there are none."""
    with _shown(path, run) as source:
        return layer_histogram(source, kind, site)


def whatif_data(path: str | Path | None, run: int | None) -> dict[str, Any]:
    """What FP16, BF16 and FP8 would have done to the run."""
    with _shown(path, run) as source:
        return _whatif(source)


@contextlib.contextmanager
def _shown(path: str | Path | None, run: int | None) -> Iterator[Source]:
    """The process that the curves and layers are of: the first, unless the culprit was seen on another."""
    db = None if path is None else str(path)
    with open_job(db, run) as (sources, _):
        yield sources[0] if len(sources) == 1 else _first_sick(sources, _summary(db, run)[0]["culprit"])


def _flags(db: str | None, run: int | None) -> list[str]:
    return [*(["--db", db] if db else []), *(["--run", str(run)] if run is not None else [])]


def _summary(db: str | None, run: int | None) -> tuple[dict[str, Any], list[str]]:
    answer, _ = ask(["summary", *_flags(db, run)])
    return dict(answer.data), [command for command in answer.next if not command.startswith("nanny report")]


def _run_data(source: Source) -> dict[str, Any]:
    run = source.run
    meta = {key: run.meta[key] for key in ("cost_percent", "exception", "failure") if key in run.meta}
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
        **finite(meta),
    }


def _verdict(summary: dict[str, Any]) -> dict[str, Any]:
    """Without the culprit itself: it is the finding that has `culprit` set."""
    culprit = summary["culprit"]
    key = None if culprit is None else [culprit.get("step"), culprit["code"], _cut(culprit.get("site", "")), culprit.get("rank")]
    text = str(summary["verdict"])
    word = text.partition(":")[0]
    return {"healthy": summary["healthy"], "text": text, "word": word, "counts": summary["counts"], "culprit": key}


def _bounded(findings: Sequence[Finding], most: int) -> tuple[list[dict[str, Any]], int]:
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
    return dict(finite(kept))


def _cut(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…"


def _sentence(text: str) -> str:
    """With marks in place of control characters: a name that turns the direction of writing would turn the rest with it."""
    return _cut(visible(text.replace("\n", " ")))


def _whatif(source: Source) -> dict[str, Any]:
    """The verdict for each format, or why there is none."""
    if _is_long(source):
        return {"note": "long", "command": source.command("whatif", "--dtype", "fp16"), "formats": []}
    formats: list[dict[str, Any]] = []
    died = ""
    for target in TARGETS:
        try:
            answer, _ = ask(["whatif", "--dtype", target, *_flags(str(source.path), source.run.id)])
        except NannyError as error:
            return {"note": str(error), "command": "", "formats": []}
        data = answer.data
        scale = data["loss_scale"]
        died, _, verdict = str(data["verdict"]).rpartition(DIED)
        formats.append(
            finite(
                {
                    "dtype": target,
                    "survives": data["survives"],
                    "with_losses": data["with_losses"],
                    "verdict": verdict,
                    "reasons": [_sentence(reason) for reason in data["reasons"]],
                    "remarks": [_cut(remark) for remark in data["remarks"] if not _CURVE.search(remark)],
                    "best_scale": scale["best"] if scale else None,
                    "skip_rate": scale["skip_rate"] if scale else None,
                    "worst": _cut(data["layers"][0]["site"]) if data["layers"] else "",
                }
            )
        )
    return {"note": died, "command": "", "formats": formats}


def _is_long(source: Source) -> bool:
    samples = histograms = 0
    for kind in reader.kinds(source.db, source.run.id):
        sites = len(reader.sites(source.db, source.run.id, kind))
        samples += sites * len(reader.sample_steps(source.db, source.run.id, kind))
        histograms += sites * len(reader.histogram_steps(source.db, source.run.id, kind))
    return samples > WHATIF_SAMPLES or histograms > WHATIF_HISTOGRAMS


def _comparison(db: str | None, other: str, this: str) -> dict[str, Any]:
    """Where this run parts from the other, which is the reference, and the other's curves."""
    answer, _ = ask(["compare", *_flags(db, None), "--", other, this])
    data = answer.data
    parted = [layer for layer in data["layers"] if layer["step"] is not None]
    with open_run(*_target(db, other)) as source:
        curves, title = curves_of(source), _run_data(source)
    return {
        "other": title,
        "curves": curves,
        "lines": [line.text for line in answer.lines if line.text],
        "parts": data["parts"],
        "for_good": data["for_good"],
        "first": finite(data["first"]),
        "curves_part": finite(data["curves"]),
        "layers": finite(parted[:MOST_PARTED]),
        "layers_parted": len(parted),
        "layers_total": len(data["layers"]),
        "notes": list(data["notes"]),
    }


def _target(db: str | None, text: str) -> tuple[str | None, int | None]:
    """The same words as `nanny compare` takes: a number in the store at hand, a path, or path:number."""
    path, colon, number = text.rpartition(":")
    if text.isdecimal():
        return db, int(text)
    return (path, int(number)) if colon and path and number.isdecimal() else (text, None)
