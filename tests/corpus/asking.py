"""Puts the question to each tool, as a user would, and compares the answer with the program's record."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import nanny
from corpus import FP32, Program, Training, by_name
from corpus.draws import seed_torch
from nanny import Finding, Severity, cli

SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
Name = Callable[[str], str]  # what a part of the original program is called in a renamed one


def built(program: Program, dtype: torch.dtype | None = None, **size: int) -> Training:
    seed_torch()
    return program.build(dtype=dtype or program.dtypes[0], **size)


def watched(training: Training, steps: int, folder: Path | None = None, **options: Any) -> nanny.MixedPrecisionNanny:
    """Trained under the monitor with its defaults."""
    watcher = nanny.MixedPrecisionNanny(
        training.model, training.optimizer, training.scaler, output_dir=folder, live=False, **options
    )
    with watcher:
        for i in range(steps):
            with watcher.step(i):
                training.step(i)
    return watcher


def examined(training: Training, at: int = 0) -> Any:
    """What the sanitizer saw in step `at`; the steps before it run without it."""
    for i in range(at):
        training.step(i)
    with nanny.sanitize(training.model, training.scaler, strict=True) as seen:
        training.step(at)
    return seen


def compared(training: Training, dtype: torch.dtype, policy: str = "native", **options: Any) -> nanny.DiffReport:
    example = training.example
    assert example is not None
    inputs = example.inputs if len(example.inputs) > 1 else example.inputs[0]
    return nanny.auto_diff(
        training.model, inputs, SHORT[dtype], loss_fn=example.loss, target=example.target, policy=policy, **options
    )


def network_parts(name: str) -> tuple[Any, Any, Any, Any]:
    """Model, input, loss and target of a program, as `auto_diff` takes them."""
    training = built(by_name()[name])
    assert training.example is not None
    inputs = training.example.inputs
    return training.model, inputs if len(inputs) > 1 else inputs[0], training.example.loss, training.example.target


def imagined(training: Training, steps: int, dtype: torch.dtype) -> dict[str, Any]:
    """`nanny whatif` about a training that was recorded in every step."""
    with tempfile.TemporaryDirectory() as folder:
        watched(training, steps, Path(folder), trace_interval=1, examine="off")
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = cli.main(["whatif", "--db", folder, "--dtype", SHORT[dtype], "--format", "json"])
    assert code == 0
    answer = json.loads(out.getvalue())
    assert isinstance(answer, dict)
    return answer


def loud(findings: Any) -> list[Finding]:
    """What would bother a user."""
    return [f for f in findings if f.severity > Severity.INFO]


def mistake(tool: str, program: Program, training: Training, dtype: torch.dtype, name: Name = str) -> str:
    """What is wrong in the tool's answer about a program, in words; nothing if it is right."""
    return ANSWERS[tool](program, training, dtype, name)


def _diagnosis(program: Program, training: Training, dtype: torch.dtype, name: Name) -> str:
    found = nanny.diagnose(watched(training, program.steps))
    if program.role != "planted":
        return "" if found == [] else f"false alarm: {found[0].summary}"
    if not found:
        return "nothing said"
    best = found[0]
    wanted = (program.cause, tuple(map(name, program.culprits)), program.precision_caused)
    right = (best.cause == wanted[0], best.culprit in wanted[1], best.precision_caused == wanted[2])
    if not all(right):
        return f"{best.cause} at {best.culprit} (precision: {best.precision_caused})"
    return "" if any(char.isdigit() for fact in best.evidence for char in fact) else "evidence without a number"


def _hazard(program: Program, training: Training, dtype: torch.dtype, name: Name) -> str:
    seen = examined(training, program.examined)
    if program.role != "planted":
        assert "failed" not in seen.examination.facts
        return "" if seen.hazards == () else f"false alarm: {seen.hazards[0].kind}, {seen.hazards[0].cause}"
    if not seen.hazards:
        return "nothing said"
    first = seen.hazards[0]
    right = (
        not program.hazards or first.kind in program.hazards,
        first.cause == program.cause,
        first.culprit in map(name, program.culprits),
        first.in_reference == program.in_reference,
    )
    if not all(right):
        return f"{first.kind}, {first.cause} at {first.culprit}" + ", in FP32 too" * first.in_reference
    return "" if first.message and first.remedy else "no words"


def _blame(program: Program, training: Training, dtype: torch.dtype, name: Name) -> str:
    reports = (compared(training, dtype, policy) for policy in program.policies)
    return next(filter(None, (_wrong_blame(program, report, name) for report in reports)), "")


def _wrong_blame(program: Program, report: nanny.DiffReport, name: Name) -> str:
    if program.role != "planted":
        findings = loud(report.findings)
        if findings:
            return f"false alarm: {findings[0].code} at {findings[0].site}"
        return "" if report.total.rel_l2 > 0 and not report.reseeds else "compared nothing"
    if not report.culprits:
        return "nobody blamed"
    if report.culprits[0] not in map(name, program.culprits):
        return f"{report.culprits[0]} blamed"
    return "" if report.findings[0].severity > Severity.INFO else "only information"


def _findings(program: Program, training: Training, dtype: torch.dtype, name: Name) -> str:
    findings = loud(watched(training, program.steps).findings)
    if program.role != "planted":
        return "" if not findings else f"false alarm: {findings[0].code} at {findings[0].site} in step {findings[0].step}"
    codes = sorted({f.code for f in findings})
    return "" if set(codes) & set(program.findings) else f"{' '.join(codes) or 'nothing'} said"


def _fate(program: Program, training: Training, dtype: torch.dtype, name: Name) -> str:
    """Asked of the same program in FP32."""
    answer = imagined(training, program.steps, dtype)
    return "" if answer["survives"] is program.survives else f"{answer['verdict']} {' '.join(answer['reasons'])}"


ANSWERS = {"diagnose": _diagnosis, "examine": _hazard, "diff": _blame, "monitor": _findings, "whatif": _fate}
RUN_IN = {"whatif": FP32}  # the format in which a tool is shown a program, where it is not that of the program
