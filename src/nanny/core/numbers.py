"""Numbers, names and times as a tired reader wants them: short, with units, never misleading."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable


def short(value: float | int | None, digits: int = 3) -> str:
    """Three significant digits; integers whole up to seven digits; NaN and infinities by name; nothing as `-`."""
    if value is None:
        return "-"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    text = f"{value:.{digits}g}"
    if "e" in text:
        mantissa, exponent = text.split("e")
        return f"{mantissa}e{int(exponent)}"
    return text


def number(value: float) -> str:
    """Whole below ten million, with commas: `65,504`; else as `short` has it."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e7 else short(value)


def share(fraction: float | None) -> str:
    """A fraction of 1 in percent; a share too small to show is not shown as zero, nor one short of all as 100."""
    if fraction is None:
        return "-"
    if math.isnan(fraction):
        return "NaN"
    percent = fraction * 100
    if percent == 0:
        return "0 %"
    if percent < 0.01:
        return "<0.01 %"
    if 99.95 <= percent < 100:
        return ">99.9 %"
    return f"{percent:.3g} %"


def deviation(error: float | None) -> str:
    """A relative error: in percent, and as a multiple where percent would be hard to read."""
    if error is None or not 10 <= abs(error) < math.inf:
        return "Inf" if error == math.inf else share(error)
    return f"{short(error)}-fold"


def power_of_two(value: float) -> str:
    """`2**16` for 65536; other values as they are."""
    if value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5:
        return f"2**{math.frexp(value)[1] - 1}"
    return short(value)


def factor(ratio: float) -> str:
    """How many times larger or smaller, in words: `3.2 times larger`, `8 % smaller`."""
    if math.isnan(ratio) or ratio < 0:
        return "not comparable"
    if math.isinf(ratio) or ratio == 0:
        return "infinitely larger" if ratio else "zero"
    grown = ratio >= 1
    times = ratio if grown else 1 / ratio
    word = "larger" if grown else "smaller"
    return f"{times:.3g} times {word}" if times >= 2 else f"{abs(ratio - 1) * 100:.2g} % {word}"


def relative(error: float, size: float) -> float:
    """Any error of nothing is infinite."""
    return error / size if size else math.inf if error else 0.0


def median(values: Collection[float]) -> float:
    """As numpy's, which imports masked arrays for it: a tenth of what `nanny summary` takes."""
    import numpy as np  # who has values has it, and who only writes words has not

    ordered = np.sort(np.asarray(values, np.float64))  # NaN come last
    if not len(ordered) or ordered[-1] != ordered[-1]:
        return math.nan
    return float((ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2)


def duration(seconds: float) -> str:
    """`340 ms`, `12 s`, `3 min 12 s`, `5 h 02 min`."""
    if seconds < 1:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def size(elements: int) -> str:
    """`512`, `6.9M`."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if elements >= unit:
            return f"{elements / unit:.3g}{letter}"
    return str(elements)


def amount(number: int, noun: str, plural: str = "") -> str:
    """`1 layer`, `12 layers`, `no layers`."""
    word = noun if number == 1 else plural or f"{noun}s"
    return f"{number or 'no'} {word}"


def shorten(text: str, width: int) -> str:
    """At most `width` characters. What does not fit is left out in the middle, but numbers stay: they tell layers apart."""
    if len(text) <= width:
        return text
    parts = [text] if re.search(r"[/\s]", text) else text.split(".")  # a path or a command is no name of a layer
    middle = (len(parts) - 1) / 2
    form = text
    words = [i for i in range(len(parts) - 1) if not parts[i].isdecimal()]
    for i in sorted(words, key=lambda i: (i == 0, abs(i - middle))):
        parts[i] = "…"
        form = re.sub(r"…(\.…)+", "…", ".".join(parts))
        if len(form) <= width and 2 * len(form) > width:  # `….py` of `evaluate_everything.py` says nothing
            return form
    form = form if len(form) > width else text
    head = max(width - 1, 0) // 3
    return f"{form[:head]}…{form[len(form) - max(width - 1 - head, 0) :]}"[: max(width, 0)]


def join_names(names: list[str], most: int = 3) -> str:
    """`a, b, c and 9 more`."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def nearest(wrong: str, known: Iterable[str]) -> str:
    """`, did you mean 'HALF_CALL'?`, or nothing."""
    from difflib import get_close_matches

    names = {name.upper(): name for name in known}
    found = get_close_matches(wrong.upper(), list(names), n=1, cutoff=0.5)
    return f", did you mean {names[found[0]]!r}?" if found else ""


WRAPPERS = ("_orig_mod", "module", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """`module._orig_mod.blocks.0.fc` as `blocks.0.fc`: without what torch.compile, DDP, FSDP, Fabric and checkpointing add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
