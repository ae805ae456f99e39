"""The pages of the checker's codes: what each finds, why it matters and what to write instead."""

from __future__ import annotations

from inspect import cleandoc

from ..core.finding import Severity

SYNTAX_ERROR = """A file that Python cannot read, so nothing in it was checked.

Why: a file that is skipped without a word looks like a file without mistakes.

Example:
    print "loss", loss

Use instead:
    print("loss", loss)

When not: a template or a test file that is broken on purpose: name it under `exclude` or `per-file-ignores` in
`[tool.nanny]` of pyproject.toml.
"""


def checker_pages() -> dict[str, tuple[Severity, str]]:
    """Code -> severity and text; a rule that also looks at settings files tells so in a section of its own."""
    from .registry import all_rules, rules_on
    from .settings import rules  # noqa: F401  (enters its rules)

    in_settings = {rule.code: rule for rule in rules_on("settings")}
    out = {}
    for code, rule in all_rules().items():
        more = f"\n\nIn settings files: {in_settings[code].doc}" if code in in_settings else ""
        out[code] = (rule.severity, rule.doc + more)
    return {**out, "SYNTAX_ERROR": (Severity.ERROR, cleandoc(SYNTAX_ERROR))}


def checker_codes() -> tuple[str, ...]:
    return tuple(checker_pages())
