"""The causes of a diagnosis: each is one generator in `judge/causes` that takes the signs of a run and yields what it suspects.

A cause is the mechanism, not the symptom. Several may fit; what a better one explains is left out, so that one trouble has one
root cause and the rest stands in its chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from inspect import cleandoc

from ..core.registry import import_all, paragraph
from .evidence import Evidence
from .records import Diagnosis
from .signs import Signs, signs_of

CERTAIN, LIKELY, POSSIBLE = 0.95, 0.8, 0.6
AHEAD = "_ahead"  # a trend towards a cause, not yet the cause itself
LOWEST = 0.5  # below, nothing is said


@dataclass(frozen=True)
class Suspicion:
    """What a cause function saw. What the docstring of the function says on remedy and confirmation holds unless given."""

    culprit: str
    score: float
    evidence: tuple[str, ...]
    chain: tuple[str, ...] = ()
    step: int | None = None
    where: str = ""
    precision_caused: bool | None = None
    remedy: str = ""
    confirm: str = ""
    early: bool = False
    expected_step: int | None = None


@dataclass(frozen=True)
class Cause:
    name: str
    family: str
    function: Callable[[Signs], Iterator[Suspicion]]
    precision: bool | None = True  # what the mechanism itself implies, where the FP32 twin has not decided
    doc: str = field(default="", compare=False)

    def paragraph(self, head: str) -> str:
        return paragraph(self.doc, head)


_CAUSES: dict[str, Cause] = {}


def cause(name: str, family: str, *, precision: bool | None = True) -> Callable[[Callable[[Signs], Iterator[Suspicion]]], object]:
    def register(function: Callable[[Signs], Iterator[Suspicion]]) -> object:
        _CAUSES[name] = Cause(name, family, function, precision, cleandoc(function.__doc__ or ""))
        return function

    return register


def all_causes() -> dict[str, Cause]:
    """Every cause in `judge/causes`, by name."""
    from . import causes

    import_all(causes)
    return _CAUSES


def suspicions_of(evidence: Evidence) -> list[Diagnosis]:
    """Everything that fits at all, best first."""
    signs = signs_of(evidence)
    found = [_diagnosis(one, seen) for one in all_causes().values() for seen in one.function(signs) if seen.score >= LOWEST]
    return sorted(found, key=lambda d: (d.early, -d.confidence, d.step if d.step is not None else 0))


def diagnoses_of(evidence: Evidence) -> list[Diagnosis]:
    """The root causes, best first: nothing on a healthy run, one for each trouble on a sick one."""
    kept: list[Diagnosis] = []
    for one in suspicions_of(evidence):
        if one.early and kept:
            continue
        if kept and not _is_apart(one, kept):
            kept[0] = _with_alternative(kept[0], one)
        else:
            kept.append(one)
    return kept


def _is_apart(one: Diagnosis, kept: list[Diagnosis]) -> bool:
    """A trouble of its own: certain, of another kind, and there before the first was."""
    first = kept[0]
    if one.confidence < CERTAIN or any(k.family == one.family or k.cause == one.cause for k in kept):
        return False
    return one.step is not None and first.step is not None and one.step < first.step and first.confidence < CERTAIN


def _with_alternative(first: Diagnosis, other: Diagnosis) -> Diagnosis:
    said = f"also fits, less well or as a consequence: {other.cause} at {other.culprit}"
    if other.cause == first.cause or said in first.evidence or len(first.evidence) >= 8:
        return first
    return replace(first, evidence=(*first.evidence, said))


def _diagnosis(one: Cause, seen: Suspicion) -> Diagnosis:
    return Diagnosis(
        cause=one.name.removesuffix(AHEAD),
        family=one.family,
        culprit=seen.culprit,
        step=seen.step,
        where=seen.where,
        confidence=round(min(seen.score, 0.99), 3),
        precision_caused=one.precision if seen.precision_caused is None else seen.precision_caused,
        evidence=seen.evidence,
        chain=seen.chain,
        remedy=seen.remedy or one.paragraph("Fix"),
        confirm=seen.confirm or one.paragraph("Confirm"),
        early=seen.early,
        expected_step=seen.expected_step,
    )
