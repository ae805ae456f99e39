"""Values that SQLite and JSON have no word for (NaN, Inf, odd strings), and findings as rows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ..core.finding import Finding, Severity
from ..core.plain_json import finite

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_PLACE = ("rank", "file", "line", "column", "end_line", "end_column", "cell")


def clean_text(text: object) -> str:
    """Text that SQLite accepts: a path with undecodable bytes holds lone surrogates, which are spelt out."""
    return str(text).encode("utf-8", "backslashreplace").decode("utf-8")


def to_json(value: Any) -> str:
    """Strict JSON of anything: non-finite numbers by name, what JSON does not know as its text."""
    try:
        return _strict(value)
    except (TypeError, ValueError):  # a key that is no text, a number that is not finite
        return _strict(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return finite(value)
    return value if value is None or isinstance(value, (str, int)) else _plain(_one_level(value))


def _one_level(value: Any) -> Any:
    """What `json` does not know, as what it knows; the parts it asks about itself. Most of a value is never seen from Python."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: getattr(value, name) for name in _names_of(type(value))}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)  # numpy scalars and arrays


_strict = json.JSONEncoder(allow_nan=False, default=_one_level).encode  # programs replace json.dumps


@lru_cache(maxsize=256)
def _names_of(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))


def _revive(value: Any) -> Any:
    if isinstance(value, str):
        return _NONFINITE.get(value, value)
    if isinstance(value, list):
        return [_revive(item) for item in value]
    if isinstance(value, dict):
        return {key: _revive(item) for key, item in value.items()}
    return value


def from_json(text: str) -> Any:
    return _revive(json.loads(text))


T = TypeVar("T")


def dataclass_of(kind: type[T], values: Mapping[str, Any]) -> T:
    """A frozen record from what `to_json(asdict(record))` kept; fields that this version does not know are left out."""
    hints = get_type_hints(kind)
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: _as_type(hints[name], value) for name, value in values.items() if name in known})


def _as_type(hint: Any, value: Any) -> Any:
    options = [o for o in get_args(hint) if o is not type(None)] if get_origin(hint) in (Union, UnionType) else [hint]
    if value is None or len(options) != 1:
        return value
    (hint,) = options
    if is_dataclass(hint) and isinstance(hint, type):
        return dataclass_of(hint, value)
    if get_origin(hint) is tuple:
        return tuple(_as_type(get_args(hint)[0], item) for item in value)
    if get_origin(hint) is frozenset:
        return frozenset(value)
    return value


def number_to_sql(value: float | None) -> float | str | None:
    """SQLite turns NaN into NULL; where NULL already means "none", NaN is the text NaN."""
    if value is None:
        return None
    value = float(value) + 0.0  # SQLite has no -0.0
    return "NaN" if math.isnan(value) else value


def finding_row(finding: Finding) -> tuple[Any, ...]:
    """In the order of the table, after its id and run."""
    place = {name: getattr(finding, name) for name in _PLACE}
    return (
        None if finding.step is None else int(finding.step),
        clean_text(finding.site),
        clean_text(finding.code),
        int(finding.severity),
        number_to_sql(finding.value),
        number_to_sql(finding.limit),
        clean_text(finding.message),
        clean_text(finding.hint),
        to_json({name: value for name, value in place.items() if value not in (None, "")}),
        to_json(finding.evidence),
    )


def finding_of(row: tuple[Any, ...]) -> Finding:
    """The finding of such a row."""
    step, site, code, severity, value, limit, message, hint, place, evidence = row
    return Finding(
        code=code,
        severity=Severity(severity),
        message=message,
        hint=hint,
        site=site,
        step=step,
        value=None if value is None else float(value),
        limit=None if limit is None else float(limit),
        evidence=from_json(evidence),
        **json.loads(place),
    )
