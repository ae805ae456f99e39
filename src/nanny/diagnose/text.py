"""A diagnosis as text: the root cause first, what proves it, how it led to the symptom, what to change."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from .describe import trial_in_words
from .records import Diagnosis
from .verdict import Verdict, certainty

BLAME = {True: "precision is the reason", False: "FP32 would have it too", None: "whether precision is the reason is not known"}


def diagnosis_lines(one: Diagnosis) -> list[str]:
    """The short form, for stderr while a run goes on."""
    lines = [f"diagnosis: {one.summary} ({certainty(one)}; {BLAME[one.precision_caused]})"]
    lines += [f"       {one.evidence[0]}"] if one.evidence else []
    lines += [f"       {trial_in_words(trial)}" for trial in one.tried]
    return [*lines, *([f"       -> {one.remedy}"] if one.remedy else [])]


def render_text(
    verdict: Verdict, cause: Diagnosis | None, title: str = "", prove: str = "", width: int = 100, language: str = "en"
) -> str:
    """`cause`: the diagnosis of the verdict, in the reader's language; `prove`: the command that would find one."""
    head = [title, ""] if title else []
    if cause is not None:
        return "\n".join([*head, *_block(cause, width, language)])
    return "\n".join([*head, *textwrap.wrap(f"{verdict.text}.", width), *_without_cause(verdict, prove)])


def _without_cause(verdict: Verdict, prove: str) -> list[str]:
    first = verdict.first
    place = "" if first is None else (f" in {first.site}" if first.site else "") + f" at step {first.step}"
    seen = [] if first is None else [f"what was seen: {first.code}{place}: {first.message}"]
    return [*seen, *([f"to find out: {prove}"] if prove else [])]


def _block(one: Diagnosis, width: int, language: str) -> Iterator[str]:
    yield f"{one.cause}: {one.culprit}"
    when = f"step {one.step}" if one.step is not None else ""
    yield f"   {', '.join(f for f in (when, one.where, certainty(one), BLAME[one.precision_caused]) if f)}"
    yield ""
    if one.source:
        yield from (f"      {line}" for line in one.source.splitlines())
        yield ""
    for fact in one.evidence:
        yield from _wrapped("   - ", fact, width)
    if one.chain:
        yield from _wrapped("   how: ", " -> ".join(one.chain), width)
    if one.remedy:
        yield from _wrapped("   fix: ", one.remedy, width)
    for trial in one.tried:
        yield from _wrapped("   - ", trial_in_words(trial, language), width)
    if one.confirm:
        yield from _wrapped("   confirm: ", one.confirm, width)
    yield f"   more: nanny rule {one.cause}"
    yield ""


def _wrapped(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 40), initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False)


def render_markdown(verdict: Verdict, one: Diagnosis | None, title: str = "", prove: str = "", language: str = "en") -> str:
    out = [f"# {title}", ""] if title else []
    if one is None:
        return "\n\n".join([*out[:1], f"{verdict.text}.", *_without_cause(verdict, prove)])
    where = f" ({one.where})" if one.where else ""
    out += [f"## {one.cause}: `{one.culprit}`", ""]
    when = f"step {one.step}{where}, " if one.step is not None else ""
    out += [f"{when}{certainty(one)}, {BLAME[one.precision_caused]}.", ""]
    out += ["```python", one.source, "```", ""] if one.source else []
    out += [*(f"- {fact}" for fact in one.evidence), ""]
    out += [f"**How:** {' → '.join(one.chain)}", ""] if one.chain else []
    out += [f"**Fix:** {one.remedy}", ""] if one.remedy else []
    out += [*(f"- {trial_in_words(trial, language)}" for trial in one.tried), ""] if one.tried else []
    out += [f"**Confirm:** {one.confirm}", ""] if one.confirm else []
    return "\n".join(out).rstrip()
