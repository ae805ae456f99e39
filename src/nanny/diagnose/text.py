"""Diagnoses as text: the root cause first, what proves it, how it led to the symptom, what to change."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from .records import Diagnosis

BLAME = {True: "precision is the reason", False: "FP32 would have it too", None: "whether precision is the reason is not known"}


def diagnosis_lines(one: Diagnosis) -> list[str]:
    """The short form, for stderr while a run goes on."""
    lines = [f"diagnosis: {one.summary} ({one.confidence:.0%} sure; {BLAME[one.precision_caused]})"]
    lines += [f"       {one.evidence[0]}"] if one.evidence else []
    return [*lines, *([f"       -> {one.remedy}"] if one.remedy else [])]


def render_text(found: Sequence[Diagnosis], title: str = "", width: int = 100) -> str:
    head = [title, ""] if title else []
    if not found:
        return "\n".join([*head, "No cause of trouble found: the run looks healthy."])
    return "\n".join([*head, *(line for number, one in enumerate(found, 1) for line in _block(one, number, len(found), width))])


def _block(one: Diagnosis, number: int, of: int, width: int) -> Iterator[str]:
    count = f"{number}. " if of > 1 else ""
    early = "  (early warning: nothing is lost yet)" if one.early else ""
    yield f"{count}{one.cause}: {one.culprit}{early}"
    when = f"step {one.step}" if one.step is not None else ""
    facts = [when, one.where, f"{one.confidence:.0%} sure", BLAME[one.precision_caused]]
    if one.expected_step is not None:
        facts.append(f"expected to fail around step {one.expected_step}")
    yield f"   {', '.join(f for f in facts if f)}"
    yield ""
    for fact in one.evidence:
        yield from _wrapped("   - ", fact, width)
    if one.chain:
        yield from _wrapped("   how: ", " -> ".join(one.chain), width)
    if one.remedy:
        yield from _wrapped("   fix: ", one.remedy, width)
    if one.confirm:
        yield from _wrapped("   confirm: ", one.confirm, width)
    yield f"   more: nanny rule {one.cause}"
    yield ""


def _wrapped(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 40), initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False)


def render_markdown(found: Sequence[Diagnosis], title: str = "") -> str:
    out = [f"# {title}", ""] if title else []
    if not found:
        return "\n".join([*out, "No cause of trouble found: the run looks healthy."])
    for one in found:
        where = f" ({one.where})" if one.where else ""
        out += [f"## {one.cause}: `{one.culprit}`", ""]
        when = f"step {one.step}{where}, " if one.step is not None else ""
        out += [f"{when}{one.confidence:.0%} sure, {BLAME[one.precision_caused]}.", ""]
        out += [*(f"- {fact}" for fact in one.evidence), ""]
        out += [f"**How:** {' → '.join(one.chain)}", ""] if one.chain else []
        out += [f"**Fix:** {one.remedy}", ""] if one.remedy else []
        out += [f"**Confirm:** {one.confirm}", ""] if one.confirm else []
    return "\n".join(out).rstrip()
