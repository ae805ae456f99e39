"""What the tools answer: typed, bounded, and without a number that JSON cannot carry (NaN and infinities are texts)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Number = float | str | None  # "NaN", "Infinity", "-Infinity" for what is not finite


@dataclass(frozen=True)
class CodeFinding:
    """A mistake in source code."""

    code: str
    severity: str
    file: str
    line: int
    column: int
    message: str
    hint: str
    source: str = ""  # the line itself
    cell: int | None = None  # of a notebook


@dataclass(frozen=True)
class CheckResult:
    total: int
    findings: list[CodeFinding]
    next_offset: int | None  # ask again with this offset for the rest
    files_checked: int
    notes: list[str]


@dataclass(frozen=True)
class Explanation:
    name: str
    kind: str  # rule or cause
    text: str  # markdown


@dataclass(frozen=True)
class RunResult:
    db: str  # give this to the other tools
    run: int
    rank: int
    started: str  # ISO 8601, UTC
    status: str  # running, finished, crashed, interrupted
    healthy: bool | None
    verdict: str
    dtype: str
    last_step: int | None
    errors: int
    warnings: int
    command: str


@dataclass(frozen=True)
class RunListResult:
    total: int
    runs: list[RunResult]  # the newest first
    next_offset: int | None
    notes: list[str]


@dataclass(frozen=True)
class RunFinding:
    """Something that went wrong in a run."""

    code: str  # explain(code) says what it means
    severity: str
    message: str
    hint: str = ""
    site: str = ""  # module, parameter or operation
    step: int | None = None
    rank: int | None = None
    file: str = ""
    line: int | None = None
    value: Number = None
    limit: Number = None
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SummaryResult:
    db: str
    run: int
    healthy: bool | None  # None: too little to tell
    verdict: str
    culprit: RunFinding | None
    counts: dict[str, int]
    first_step: int | None
    last_step: int | None
    status: str
    dtype: str
    command: str
    curves: dict[str, dict[str, Any]]  # loss, grad_norm, scale ...: first, last, min, max, median, nonfinite
    notes: list[str]
    next: str


@dataclass(frozen=True)
class FindingsResult:
    verdict: str
    total: int
    findings: list[RunFinding]
    next_offset: int | None


@dataclass(frozen=True)
class AnomalyResult:
    healthy: bool | None
    verdict: str
    first: RunFinding | None
    warned_before: list[RunFinding]
    loss_not_finite_from: int | None
    skipped_steps: int
    next: str  # which tool to ask now


@dataclass(frozen=True)
class LayerKind:
    kind: str  # output, output_grad, weight, grad, update, buffer
    dtype: str
    shape: list[int]
    total_steps: int
    steps: list[int]
    values: dict[str, list[Number]]  # norm, min, max ...: one per step
    nonfinite_steps: list[int]


@dataclass(frozen=True)
class LayerResult:
    layer: str
    kinds: list[LayerKind]
    findings: list[RunFinding]
    next_offset: int | None


@dataclass(frozen=True)
class ComparisonResult:
    parts: bool
    verdict: str
    first: dict[str, Any] | None  # where and when they part first
    for_good: bool | None
    curves: list[dict[str, Any]]
    layers: list[dict[str, Any]]
    total_layers: int
    notes: list[str]


@dataclass(frozen=True)
class DiagnosisResult:
    cause: str  # explain(cause) says how it comes about
    family: str
    culprit: str
    step: int | None
    where: str  # file:line if known
    source: str  # that line, with carets under the operation if known
    format: str  # the low format that it is about
    confidence: float
    precision_caused: bool | None
    evidence: list[str]
    chain: list[str]
    remedy: str
    confirm: str
    early: bool
    expected_step: int | None
    tried: list[dict[str, Any]]  # its remedies, tried on the very step: `text` says what came of it, `helped` whether it did


@dataclass(frozen=True)
class DiagnosesResult:
    db: str
    run: int
    diagnoses: list[DiagnosisResult]  # best first; empty on a healthy run
    verdict: str


@dataclass(frozen=True)
class WhatIfResult:
    dtype: str
    survives: bool | None  # None: with losses
    verdict: str
    reasons: list[str]
    remarks: list[str]
    layers: list[dict[str, Any]]
    total_layers: int


@dataclass(frozen=True)
class OutputResult:
    """What a command printed that executed the user's code."""

    command: str
    exit_code: int
    output: str
    log: str
    notes: list[str]
