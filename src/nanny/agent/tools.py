"""The questions that an agent can put to the nanny. Each answers from files alone: nothing is run and nothing is written.

Every method of `Tools` is served as a tool of the same name; its docstring is what the agent reads.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, TypeVar

from ..core.finding import Finding, NannyError, Severity
from ..core.formats import format_of
from ..core.plain_json import finite
from ..diagnose.verdict import cause_in_words
from ..runs.alerts import find_alerts
from ..runs.compare import compare_runs
from ..runs.layer import KindHistory, layer_history
from ..runs.opening import open_compared, open_job, open_run
from ..runs.runs import ListedRun, judged, list_runs
from ..runs.source import step_range
from ..runs.summary import Summary, curve_stats, summarize
from ..runs.text.compare import comparison_verdict
from ..runs.text.what_if import what_if_headline, what_if_reasons, what_if_remarks
from ..runs.what_if import judge_in_format
from . import results
from .folder import ReadableFolder, real_path

MOST_ROWS = 200
LONGEST_SOURCE = 1_000_000
LONGEST_LINE = 200

Db = Annotated[str | None, "a metrics.db or its folder, as list_runs gives it; leave it out for the usual one"]
Run = Annotated[int | None, "the number of the run in it; leave it out for the newest"]
MostRows = Annotated[int, f"at most this many rows, 1 to {MOST_ROWS}"]
Offset = Annotated[int, "leave out this many rows: the next_offset of the answer before"]

Told = TypeVar("Told", results.CodeFinding, results.RunFinding)


@dataclass(frozen=True)
class Tools:
    folder: ReadableFolder

    def check_code(
        self,
        path: Annotated[str | None, "a file, notebook, settings file or folder below the root"] = None,
        text: Annotated[str | None, "source code, instead of a path"] = None,
        device: Annotated[Literal["cuda", "cpu"] | None, "what the code trains on, if it does not say so itself"] = None,
        amp_dtype: Annotated[Literal["fp16", "bf16"] | None, "the format, if the code does not say so itself"] = None,
        severity: Annotated[Literal["info", "warning", "error"], "this severity and above"] = "info",
        limit: MostRows = 50,
        offset: Offset = 0,
    ) -> results.CheckResult:
        """Find mixed-precision mistakes in Python source without running it. Give either `path` or `text`."""
        from ..check.config import Config, amp_dtype_name, device_name, find_config
        from ..check.files import check_paths, check_text
        from ..check.walk import find_files

        if (path is None) == (text is None):
            raise NannyError("give either path or text")
        overrides = Config(device=device_name(device), amp_dtype=amp_dtype_name(amp_dtype))
        notes: list[str] = []
        if text is not None:
            if len(text) > LONGEST_SOURCE:
                raise NannyError(f"text holds {len(text)} characters; give at most {LONGEST_SOURCE}, or a path")
            report = check_text(text, "<text>", overrides)
        else:
            real = self.folder.path(path or "")
            top = str(self.folder.root)
            config = find_config(str(real), top)
            found = [f.path for f in find_files(str(real), notes, config.exclude, config.root)]
            inside = [f for f in found if self.folder.holds(real_path(f))]
            notes += [f"{self.folder.display_path(f)}: skipped, it leads outside the root" for f in found if f not in set(inside)]
            report = check_paths(inside, overrides, jobs=1, top=top)
        wanted = [f for f in report.findings if f.severity >= Severity.parse(severity)]
        page, following = _page(wanted, limit, offset)
        lines = report.lines
        return results.CheckResult(
            total=len(wanted),
            findings=[self._code_finding(f, lines.get((f.file, f.cell), [])) for f in page],
            next_offset=following,
            files_checked=len(report.files) or int(text is not None),
            notes=[*notes, *report.notes][:20],
        )

    def explain(
        self,
        name: Annotated[str, "the code of a finding (SCALE_COLLAPSE) or a cause (exp_overflow_fp16)"],
        lang: Annotated[Literal["en", "zh"], "zh: in Chinese"] = "en",
    ) -> results.Explanation:
        """Explain a finding's code or a cause: mechanism, how it shows, failing and repaired code."""
        from ..show.pages import page_markdown, page_of

        page = page_of(name, lang)
        return results.Explanation(page.code, "cause" if page.by == "nanny diagnose" else "rule", page_markdown(page))

    def list_runs(self, db: Db = None, limit: MostRows = 50, offset: Offset = 0) -> results.RunListResult:
        """List recorded training runs, the newest first, with their verdicts. Without db: all below the root."""
        rows: list[ListedRun] = []
        notes: list[str] = []
        for place in [self.folder.store(db)] if db else list(map(str, self.folder.stores())):
            try:
                found = list_runs(place)
            except NannyError as error:
                notes.append(str(error))
                continue
            rows += found.runs
            notes += found.notes
        rows.sort(key=lambda row: -row.started)
        page, following = _page(rows, limit, offset)
        return results.RunListResult(len(rows), [self._run_result(row) for row in judged(page)], following, notes[:20])

    def run_summary(self, db: Db = None, run: Run = None) -> results.SummaryResult:
        """The verdict on one run: healthy or not, the first culprit, and its curves in numbers."""
        with open_job(self.folder.store(db), run) as (sources, notes):
            summary = summarize(sources, notes)
        lead = summary.lead
        about = lead.source.run
        first, last = lead.steps or (None, None)
        return results.SummaryResult(
            db=self.folder.display_path(lead.source.path),
            run=about.id,
            healthy=summary.verdict.healthy,
            verdict=self._verdict(summary),
            culprit=self._culprit(summary),
            counts=dict(summary.counts),
            first_step=first,
            last_step=last,
            status=about.status,
            dtype=about.amp_dtype,
            command=" ".join(about.argv),
            curves={name: finite(vars(curve_stats(*curve))) for name, curve in lead.curves.items()},
            notes=summary.notes,
            next=_after_summary(summary.verdict.healthy),
        )

    def findings(
        self,
        db: Db = None,
        run: Run = None,
        severity: Annotated[Literal["info", "warning", "error"], "this severity and above"] = "info",
        code: Annotated[str | None, "only this code"] = None,
        layer: Annotated[str | None, "only layers that match this glob, or one layer and what is in it"] = None,
        steps: Annotated[str | None, "100, 100:200, 100: or :200"] = None,
        limit: MostRows = 50,
        offset: Offset = 0,
    ) -> results.FindingsResult:
        """What went wrong in a run, in the order in which it happened."""
        from ..show.pages import page_of

        between = step_range(steps) if steps else None
        with open_job(self.folder.store(db), run) as (sources, _):
            codes = [code] if code else []
            alerts = find_alerts(sources, severity=Severity.parse(severity), codes=codes, steps=between, layer=layer or None)
        for unknown in alerts.unknown_codes:  # a mistyped code must not pass for a run without findings
            page_of(unknown)
        page, following = _page(alerts.found, limit, offset)
        return results.FindingsResult(alerts.verdict.text, len(alerts.found), [self._run_finding(f) for f in page], following)

    def first_anomaly(self, db: Db = None, run: Run = None) -> results.AnomalyResult:
        """Where a run first went wrong: step, layer, source line if known, and what had warned before."""
        with open_job(self.folder.store(db), run) as (sources, _):
            summary = summarize(sources)
        skipped = summary.lead.curves.get("skipped")
        return results.AnomalyResult(
            healthy=summary.verdict.healthy,
            verdict=self._verdict(summary),
            first=self._culprit(summary),
            warned_before=[self._run_finding(f) for f in summary.warned_before[:10]],
            loss_not_finite_from=summary.lead.first_nonfinite_loss,
            skipped_steps=0 if skipped is None else int(curve_stats(*skipped).sum),
            next=_after_summary(summary.verdict.healthy),
        )

    def layer_history(
        self,
        layer: Annotated[str, "the name of a module or parameter, or a part of it that is unique"],
        db: Db = None,
        run: Run = None,
        steps: Annotated[str | None, "100, 100:200, 100: or :200"] = None,
        limit: MostRows = 50,
        offset: Offset = 0,
    ) -> results.LayerResult:
        """Statistics of one layer over the steps of a run, for each kind: outputs, gradients, weights. The latest steps first."""
        between = step_range(steps) if steps else None
        with open_run(self.folder.store(db), run) as source:
            found = layer_history(source, layer, steps=between)
        kinds, following = [], None
        for history in found.kinds:
            rows, more = _page(range(len(history.steps) - 1, -1, -1), limit, offset)
            following = following or more
            kinds.append(_layer_kind(history, rows))
        return results.LayerResult(found.name, kinds, [self._run_finding(f) for f in found.findings[:MOST_ROWS]], following)

    def compare_runs(
        self,
        run_a: Annotated[int, "the reference"],
        run_b: Annotated[int, "the other run"],
        db_a: Db = None,
        db_b: Annotated[str | None, "where run_b is, if elsewhere than run_a"] = None,
        layer: Annotated[str | None, "only layers that match this glob"] = None,
        limit: MostRows = 30,
    ) -> results.ComparisonResult:
        """Where two runs part first: which step, which curve, which layer."""
        place_a = self.folder.store(db_a)
        place_b = self.folder.store(db_b) if db_b else place_a
        with open_compared(place_a, run_a) as a, open_compared(place_b, run_b) as b:
            result = compare_runs(a, b, layer or None)
        layers, _ = _page(result.layers, limit, 0)
        return results.ComparisonResult(
            parts=result.first is not None,
            verdict=comparison_verdict(result).text,
            first=None if result.first is None else finite(vars(result.first)),
            for_good=result.for_good,
            curves=finite([vars(curve) for curve in result.curves]),
            layers=finite([vars(series) for series in layers]),
            total_layers=len(result.layers),
            notes=result.notes,
        )

    def diagnose(self, db: Db = None, run: Run = None) -> results.DiagnosesResult:
        """The root causes of what went wrong in a run, best first, with evidence, remedy and how to confirm. Empty if healthy."""
        with open_job(self.folder.store(db), run) as (sources, _):
            summary = summarize(sources)
        found, lead = summary.diagnosis, summary.lead.source
        rows = [
            results.DiagnosisResult(**finite({**d.to_json(), "where": self._place(d.where)})) for d in (found,) if d is not None
        ]
        return results.DiagnosesResult(self.folder.display_path(lead.path), lead.run.id, rows, self._verdict(summary))

    def what_if(
        self,
        dtype: Annotated[Literal["fp16", "bf16", "fp8_e4m3", "fp8_e5m2"], "the format to imagine"],
        db: Db = None,
        run: Run = None,
        scale: Annotated[float | None, "a fixed loss scale, a power of two; leave it out for the best"] = None,
        layer: Annotated[str | None, "only layers that match this glob"] = None,
        limit: MostRows = 30,
    ) -> results.WhatIfResult:
        """Would this run have survived in another format? Answered from the recorded exponent histograms."""
        with open_run(self.folder.store(db), run) as source:
            result = judge_in_format(source, format_of(dtype), scale, layer or None)
        layers, _ = _page(result.outcomes, limit, 0)
        return results.WhatIfResult(
            dtype=result.target.name,
            survives=result.survives,
            verdict=what_if_headline(result),
            reasons=what_if_reasons(result),
            remarks=what_if_remarks(result),
            layers=finite([vars(outcome) for outcome in layers]),
            total_layers=len(result.outcomes),
        )

    # what they share

    def _verdict(self, summary: Summary) -> str:
        one = summary.diagnosis
        if one is None:
            return summary.verdict.text
        return f"{summary.verdict.word}: {cause_in_words(replace(one, where=self._place(one.where)), summary.verdict.rank)}"

    def _culprit(self, summary: Summary) -> results.RunFinding | None:
        return None if summary.culprit is None else self._run_finding(summary.culprit)

    def _code_finding(self, finding: Finding, lines: Sequence[str]) -> results.CodeFinding:
        line = finding.line or 1
        source = lines[line - 1].strip()[:LONGEST_LINE] if line <= len(lines) else ""
        return self._as(results.CodeFinding, finding, line=line, column=finding.column or 1, source=source)

    def _run_finding(self, finding: Finding) -> results.RunFinding:
        return self._as(results.RunFinding, finding)

    def _as(self, kind: type[Told], finding: Finding, **more: Any) -> Told:
        """A finding by the fields that this answer has of it, without numbers that JSON cannot carry."""
        file = self.folder.display_path(finding.file) if finding.file else ""
        more |= {"severity": finding.severity.name.lower(), "file": file}
        same = (field.name for field in fields(kind) if field.name not in more)
        return kind(**{name: finite(getattr(finding, name)) for name in same}, **more)

    def _run_result(self, row: ListedRun) -> results.RunResult:
        started = datetime.datetime.fromtimestamp(row.started, datetime.timezone.utc).isoformat(timespec="seconds")
        return results.RunResult(
            db=self.folder.display_path(real_path(row.file)),
            run=row.run,
            rank=row.rank,
            started=started,
            status=row.status,
            healthy=row.healthy,
            verdict=row.verdict,
            dtype=row.amp_dtype,
            last_step=row.last_step,
            errors=row.errors,
            warnings=row.warnings,
            command=row.argv,
        )

    def _place(self, where: str) -> str:
        file, colon, line = where.rpartition(":")
        return f"{self.folder.display_path(real_path(file))}:{line}" if colon and os.path.isabs(file) else where


def _layer_kind(history: KindHistory, rows: Sequence[int]) -> results.LayerKind:
    columns = {name: column.tolist() for name, column in history.values.items() if name != "count"}
    steps = history.steps.tolist()
    bad = [step for i, step in enumerate(steps) if not all(math.isfinite(column[i]) for column in columns.values())]
    values = {name: finite([column[i] for i in rows]) for name, column in columns.items()}
    site = history.site
    return results.LayerKind(
        site.kind, site.dtype, list(site.shape), len(steps), [steps[i] for i in rows], values, bad[:MOST_ROWS]
    )


def _page(rows: Sequence[Any], limit: int, offset: int) -> tuple[Sequence[Any], int | None]:
    """These rows, and the offset of those after them if there are any."""
    if not 1 <= limit <= MOST_ROWS:
        raise NannyError(f"limit is {limit}; use 1 to {MOST_ROWS}")
    if offset < 0:
        raise NannyError(f"offset is {offset}; use 0 or more")
    end = offset + limit
    return rows[offset:end], end if end < len(rows) else None


def _after_summary(healthy: bool | None) -> str:
    if healthy is None:
        return "nothing: there is no step on record yet; read it again later, or record a run with `nanny run train.py`"
    return "what_if tells whether it would survive in another format" if healthy else "diagnose gives the cause"
