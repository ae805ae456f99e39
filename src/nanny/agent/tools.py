"""The questions that an agent can put to the nanny. Each answers from files alone: nothing is run and nothing is written.

Every method of `Tools` is served as a tool of the same name; its docstring is what the agent reads.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from ..core.finding import Finding, NannyError, Severity
from ..core.plain_json import finite
from .results import (
    Anomaly,
    CheckResult,
    CodeFinding,
    DiagnosisList,
    DiagnosisRow,
    Explanation,
    FindingList,
    LayerHistory,
    LayerKind,
    RunComparison,
    RunFinding,
    RunList,
    RunRow,
    Summary,
    WhatIf,
)
from .room import Room

MOST_ROWS = 200
LONGEST_SOURCE = 1_000_000
LONGEST_LINE = 200

Db = Annotated[str | None, "a metrics.db or its folder, as list_runs gives it; leave it out for the usual one"]
Run = Annotated[int | None, "the number of the run in it; leave it out for the newest"]
Limit = Annotated[int, f"at most this many rows, 1 to {MOST_ROWS}"]
Offset = Annotated[int, "leave out this many rows: the next_offset of the answer before"]


@dataclass(frozen=True)
class Tools:
    room: Room

    def check_code(
        self,
        path: Annotated[str | None, "a file, notebook, settings file or folder below the root"] = None,
        text: Annotated[str | None, "source code, instead of a path"] = None,
        device: Annotated[Literal["cuda", "cpu"] | None, "what the code trains on, if it does not say so itself"] = None,
        amp_dtype: Annotated[Literal["fp16", "bf16"] | None, "the format, if the code does not say so itself"] = None,
        severity: Annotated[Literal["info", "warning", "error"], "this severity and above"] = "info",
        limit: Limit = 50,
        offset: Offset = 0,
    ) -> CheckResult:
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
            real = self.room.path(path or "")
            config = find_config(str(real))
            found = [f.path for f in find_files(str(real), notes, config.exclude, config.root)]
            inside = [f for f in found if self.room.holds(Path(f).resolve())]
            notes += [f"{self.room.shown(f)}: skipped, it leads outside the root" for f in found if f not in set(inside)]
            report = check_paths(inside, overrides, jobs=1)
        wanted = [f for f in report.findings if f.severity >= Severity.parse(severity)]
        page, following = _page(wanted, limit, offset)
        lines = report.lines
        return CheckResult(
            total=len(wanted),
            findings=[self._code_finding(f, lines.get((f.file, f.cell), [])) for f in page],
            next_offset=following,
            files_checked=len(report.files) or int(text is not None),
            notes=[*notes, *report.notes][:20],
        )

    def explain(
        self,
        name: Annotated[str, "the code of a finding (SCALE_COLLAPSE) or a cause (exp_overflow_fp16)"],
        lang: Annotated[Literal["en", "zh"], "zh: in Chinese, where there is such a page"] = "en",
    ) -> Explanation:
        """Explain a finding's code or a cause: mechanism, how it shows, failing and repaired code."""
        from ..show.pages import page_markdown, page_of

        page = page_of(name, lang)
        return Explanation(page.code, "cause" if page.by == "nanny diagnose" else "rule", page_markdown(page))

    def list_runs(self, db: Db = None, limit: Limit = 50, offset: Offset = 0) -> RunList:
        """List recorded training runs, the newest first, with their verdict in numbers. Without db: all below the root."""
        data, notes = [], []
        for place in [self.room.store(db)] if db else list(map(str, self.room.stores())):
            try:
                answer = self._ask("runs", place, None)
            except NannyError as error:
                notes.append(str(error))
                continue
            data += answer["runs"]
            notes += answer["notes"]
        data.sort(key=lambda row: -row["started"])
        page, following = _page(data, limit, offset)
        return RunList(len(data), [self._run_row(row) for row in page], following, notes[:20])

    def run_summary(self, db: Db = None, run: Run = None) -> Summary:
        """The verdict on one run: healthy or not, the first culprit, and its curves in numbers."""
        data = self._ask("summary", self.room.store(db), run)
        steps = data["steps"] or {"first": None, "last": None}
        about = data["run"]
        healthy = data["healthy"]
        return Summary(
            db=self.room.shown(about["file"]),
            run=about["id"],
            healthy=healthy,
            verdict=data["verdict"],
            culprit=None if data["culprit"] is None else self._run_finding(data["culprit"]),
            counts=data["counts"],
            first_step=steps["first"],
            last_step=steps["last"],
            status=about["status"],
            dtype=about["amp_dtype"],
            command=" ".join(about["argv"]),
            curves=data["curves"],
            notes=data["notes"],
            next=_after_summary(healthy),
        )

    def findings(
        self,
        db: Db = None,
        run: Run = None,
        severity: Annotated[Literal["info", "warning", "error"], "this severity and above"] = "info",
        code: Annotated[str | None, "only this code"] = None,
        layer: Annotated[str | None, "only layers that match this glob, or one layer and what is in it"] = None,
        steps: Annotated[str | None, "100, 100:200, 100: or :200"] = None,
        limit: Limit = 50,
        offset: Offset = 0,
    ) -> FindingList:
        """What went wrong in a run, in the order in which it happened."""
        words = [f"--severity={severity}"]
        words += [f"--code={code}"] if code else []
        words += [f"--layer={layer}"] if layer else []
        words += [f"--step={steps}"] if steps else []
        found = self._ask("alerts", self.room.store(db), run, *words)["findings"]
        page, following = _page(found, limit, offset)
        return FindingList(len(found), [self._run_finding(f) for f in page], following)

    def first_anomaly(self, db: Db = None, run: Run = None) -> Anomaly:
        """Where a run first went wrong: step, layer, source line if known, and what had warned before."""
        place = self.room.store(db)
        summary = self.run_summary(db, run)
        first = summary.culprit
        before = []
        if first is not None and first.step is not None and first.step > 0:
            earlier = self._ask("alerts", place, run, "--severity=warning", f"--step=:{first.step - 1}")["findings"]
            before = [self._run_finding(f) for f in earlier[:10]]
        skipped = summary.curves.get("skipped", {}).get("sum", 0)
        return Anomaly(
            healthy=summary.healthy,
            verdict=summary.verdict,
            first=first,
            warned_before=before,
            loss_not_finite_from=self._first_nonfinite_loss(place, run),
            skipped_steps=int(skipped),
            next="diagnose gives the cause" if first is not None else "nothing: the run shows no anomaly",
        )

    def layer_history(
        self,
        layer: Annotated[str, "the name of a module or parameter, or a part of it that is unique"],
        db: Db = None,
        run: Run = None,
        steps: Annotated[str | None, "100, 100:200, 100: or :200"] = None,
        limit: Limit = 50,
        offset: Offset = 0,
    ) -> LayerHistory:
        """Statistics of one layer over the steps of a run, for each kind: outputs, gradients, weights. The latest steps first."""
        words = [f"--step={steps}"] if steps else []
        data = self._ask("layer", self.room.store(db), run, *words, "--", layer)
        kinds, following = [], None
        for kind, columns in data["kinds"].items():
            rows, more = _page(range(len(columns["steps"]) - 1, -1, -1), limit, offset)
            following = following or more
            kinds.append(_layer_kind(kind, columns, rows))
        return LayerHistory(data["layer"], kinds, [self._run_finding(f) for f in data["findings"][:MOST_ROWS]], following)

    def compare_runs(
        self,
        run_a: Annotated[int, "the reference"],
        run_b: Annotated[int, "the other run"],
        db_a: Db = None,
        db_b: Annotated[str | None, "where run_b is, if elsewhere than run_a"] = None,
        layer: Annotated[str | None, "only layers that match this glob"] = None,
        limit: Limit = 30,
    ) -> RunComparison:
        """Where two runs part first: which step, which curve, which layer."""
        place_a = self.room.store(db_a)
        place_b = self.room.store(db_b) if db_b else place_a
        words = [f"--layer={layer}"] if layer else []
        answer = self._answer("compare", None, None, *words, "--", f"{place_a}:{run_a}", f"{place_b}:{run_b}")
        data = finite(answer.data)
        layers, _ = _page(data["layers"], limit, 0)
        return RunComparison(
            parts=data["parts"],
            verdict=answer.lines[0].text,
            first=data["first"],
            for_good=data["for_good"],
            curves=data["curves"],
            layers=list(layers),
            total_layers=len(data["layers"]),
            notes=data["notes"],
        )

    def diagnose(self, db: Db = None, run: Run = None) -> DiagnosisList:
        """The root causes of what went wrong in a run, best first, with evidence, remedy and how to confirm. Empty if healthy."""
        from ..diagnose.run import diagnose

        found = diagnose(self.room.store(db), run)
        summary = self.run_summary(db, run)
        rows = [DiagnosisRow(**finite({**d.to_json(), "where": self._place(d.where)})) for d in found]
        unproved = "no cause for alarm" if summary.healthy else "no cause is proved by what was seen"
        return DiagnosisList(summary.db, summary.run, rows, f"{len(rows)} found" if rows else unproved)

    def what_if(
        self,
        dtype: Annotated[Literal["fp16", "bf16", "fp8_e4m3", "fp8_e5m2"], "the format to imagine"],
        db: Db = None,
        run: Run = None,
        scale: Annotated[float | None, "a fixed loss scale, a power of two; leave it out for the best"] = None,
        layer: Annotated[str | None, "only layers that match this glob"] = None,
        limit: Limit = 30,
    ) -> WhatIf:
        """Would this run have survived in another format? Answered from the recorded exponent histograms."""
        words = [f"--dtype={dtype}"]
        words += [f"--scale={scale!r}"] if scale is not None else []
        words += [f"--layer={layer}"] if layer else []
        data = self._ask("whatif", self.room.store(db), run, *words)
        layers, _ = _page(data["layers"], limit, 0)
        return WhatIf(
            dtype=data["dtype"],
            survives=None if data["with_losses"] else data["survives"],
            verdict=data["verdict"],
            reasons=data["reasons"],
            remarks=data["remarks"],
            layers=list(layers),
            total_layers=len(data["layers"]),
        )

    # what they share

    def _ask(self, command: str, db: str, run: int | None, *words: str) -> dict[str, Any]:
        data: dict[str, Any] = finite(self._answer(command, db, run, *words).data)
        return data

    def _answer(self, command: str, db: str | None, run: int | None, *words: str) -> Any:
        from ..runs.command import ask

        flags = [f"--db={db}"] if db else []
        flags += [f"--run={run}"] if run is not None else []
        return ask([command, "--format=json", *flags, *words])[0]

    def _first_nonfinite_loss(self, place: str, run: int | None) -> int | None:
        from ..runs.source import open_run
        from ..runs.whatif import first_nonfinite_loss

        with open_run(place, run) as source:
            return first_nonfinite_loss(source)

    def _code_finding(self, finding: Finding, lines: Sequence[str]) -> CodeFinding:
        line = finding.line or 1
        return CodeFinding(
            code=finding.code,
            severity=finding.severity.name.lower(),
            file=self.room.shown(finding.file),
            line=line,
            column=finding.column or 1,
            message=finding.message,
            hint=finding.hint,
            source=lines[line - 1].strip()[:LONGEST_LINE] if line <= len(lines) else "",
            cell=finding.cell,
        )

    def _run_finding(self, data: Mapping[str, Any]) -> RunFinding:
        known = {name: data[name] for name in RunFinding.__dataclass_fields__ if name in data}
        file = data.get("filename", "")
        position = data.get("location") or {}
        if file:
            known |= {"file": self.room.shown(file), "line": position.get("row")}
        return RunFinding(**{**known, "severity": str(data["severity"]).lower()})

    def _run_row(self, row: Mapping[str, Any]) -> RunRow:
        started = datetime.datetime.fromtimestamp(row["started"], datetime.timezone.utc).isoformat(timespec="seconds")
        return RunRow(
            db=self.room.shown(Path(row["file"]).resolve()),
            run=row["run"],
            rank=row["rank"],
            started=started,
            status=row["status"],
            dtype=row["amp_dtype"],
            last_step=row["last_step"],
            errors=row["errors"],
            warnings=row["warnings"],
            command=row["argv"],
        )

    def _place(self, where: str) -> str:
        file, colon, line = where.rpartition(":")
        return f"{self.room.shown(Path(file).resolve())}:{line}" if colon and file else where


def _layer_kind(kind: str, columns: Mapping[str, Any], rows: Sequence[int]) -> LayerKind:
    stats = [name for name in columns if name not in ("dtype", "shape", "steps", "count")]
    steps = columns["steps"]
    bad = [step for i, step in enumerate(steps) if any(isinstance(columns[name][i], str) for name in stats)]
    values = {name: [columns[name][i] for i in rows] for name in stats}
    return LayerKind(kind, columns["dtype"], columns["shape"], len(steps), [steps[i] for i in rows], values, bad[:MOST_ROWS])


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
