"""Which questions `make test` asks, and which answers are known to be wrong: marks for pytest, made from data."""

from __future__ import annotations

from typing import Any

import pytest

from corpus import Program
from corpus.known_wrong import DEPENDS_ON_MACHINE, KNOWN_WRONG
from corpus.quick import QUICK


def question(tool: str, program: Program, variant: Any = "", is_judged: bool = True) -> Any:
    """`is_judged`: whether the answer is compared with the right one, or only with another."""
    marks: list[Any] = [] if program.name in QUICK[tool if not str(variant) else f"{tool} variants"] else [pytest.mark.slow]
    wrong = KNOWN_WRONG.get((tool, program.name, str(variant))) or (variant and KNOWN_WRONG.get((tool, program.name, "*")))
    if wrong and is_judged:
        marks.append(pytest.mark.xfail(reason=wrong, strict=True))
    if (tool, program.name) in DEPENDS_ON_MACHINE:
        marks.append(pytest.mark.xfail(reason="right on some machines only", strict=False))
    values = (program, variant) if str(variant) else (program,)
    return pytest.param(*values, marks=marks, id=" ".join(filter(None, (program.name, str(variant)))))
