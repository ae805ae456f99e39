"""A diagnosis as text: the root cause first, what proves it, how it led to the symptom, what to change."""

from __future__ import annotations

from collections.abc import Iterator

from ..show.tables import Line, lines_text
from .records import Diagnosis
from .trials import trial_in_words
from .verdict import Verdict, certainty

BLAME = {True: "precision is the reason", False: "FP32 would have it too", None: "whether precision is the reason is not known"}


def diagnosis_lines(one: Diagnosis, language: str = "en") -> list[str]:
    """The short form, for stderr while a run goes on; what was tried in the reader's language."""
    lines = [f"diagnosis: {one.summary} ({certainty(one)}; {BLAME[one.precision_caused]})"]
    lines += [f"       {one.evidence[0]}"] if one.evidence else []
    lines += [f"       {trial_in_words(trial, language)}" for trial in one.tried]
    return [*lines, *([f"       -> {one.remedy}"] if one.remedy else [])]


def diagnosis_block(verdict: Verdict, cause: Diagnosis | None, prove: str = "", language: str = "en") -> list[Line]:
    """`cause`: the diagnosis of the verdict, in the reader's language; `prove`: the command that would find one."""
    if cause is not None:
        return [*cause_block(cause, "warning" if verdict.word == "SUSPECT" else "error", language, verdict.rank)]
    style = {True: "good", False: "error", None: "warning"}[verdict.healthy]
    return [Line(f"{verdict.text}.", style), *(Line(text, indent=4) for text in _without_cause(verdict, prove))]


def render_cause(one: Diagnosis, colour: bool = False) -> str:
    return lines_text([*cause_block(one)], 100, colour=colour)


def _without_cause(verdict: Verdict, prove: str) -> list[str]:
    first = verdict.first
    place = "" if first is None else (f" in {first.site}" if first.site else "") + f" at step {first.step}"
    seen = [] if first is None else [f"what was seen: {first.code}{place}: {first.message}"]
    return [*seen, *([f"to find out: {prove}"] if prove else [])]


def cause_block(one: Diagnosis, style: str = "error", language: str = "en", rank: int | None = None) -> Iterator[Line]:
    yield Line(f"{one.cause}: {one.culprit}", style)
    when = f"step {one.step}" if one.step is not None else ""
    process = "" if rank is None else f"rank {rank}"
    yield Line(
        f"   {', '.join(f for f in (when, process, one.where, certainty(one), BLAME[one.precision_caused]) if f)}", "strong", 3
    )
    yield Line("")
    if one.source:
        yield from (
            Line(f"      {line}", "warning" if set(line) <= set(" ^") else "", whole=True) for line in one.source.splitlines()
        )
        yield Line("")
    for fact in one.evidence:
        yield Line(f"   - {fact}", indent=5)
    if one.chain:
        yield Line(f"   how: {' -> '.join(one.chain)}", indent=8)
    if one.remedy:
        yield Line(f"   fix: {one.remedy}", "good", 8)
    for trial in one.tried:
        yield Line(f"   - {trial_in_words(trial, language)}", indent=5)
    if one.confirm:
        yield Line(f"   confirm: {one.confirm}", indent=12)
    yield Line(f"   more: nanny rule {one.cause}", "quiet", 9)


def render_markdown(verdict: Verdict, one: Diagnosis | None, title: str = "", prove: str = "", language: str = "en") -> str:
    out = [f"# {title}", ""] if title else []
    if one is None:
        return "\n\n".join([*out[:1], f"{verdict.text}.", *_without_cause(verdict, prove)])
    where = f" ({one.where})" if one.where else ""
    out += [f"## {one.cause}: `{one.culprit}`", ""]
    when = f"step {one.step}{where}, " if one.step is not None else ""
    when += "" if verdict.rank is None else f"rank {verdict.rank}, "
    out += [f"{when}{certainty(one)}, {BLAME[one.precision_caused]}.", ""]
    out += ["```python", one.source, "```", ""] if one.source else []
    out += [*(f"- {fact}" for fact in one.evidence), ""]
    out += [f"**How:** {' → '.join(one.chain)}", ""] if one.chain else []
    out += [f"**Fix:** {one.remedy}", ""] if one.remedy else []
    out += [*(f"- {trial_in_words(trial, language)}" for trial in one.tried), ""] if one.tried else []
    out += [f"**Confirm:** {one.confirm}", ""] if one.confirm else []
    return "\n".join(out).rstrip()
