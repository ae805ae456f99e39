"""`[tool.nanny]` in pyproject.toml, found by walking up from the checked path.

For instance:

    [tool.nanny]
    select = ["SCALER", "NUM"]
    ignore = ["REGION_DEPRECATED"]
    exclude = ["third_party"]
    device = "cuda"
    amp-dtype = "fp16"

    [tool.nanny.per-file-ignores]
    "tests/*" = ["NUM"]
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..core.finding import Finding, NannyError
from ..core.formats import format_of
from ..core.regular_files import parsed_toml, read_regular
from .suppress import selects
from .walk import matches_path

DEVICES = ("cuda", "cpu")
AMP_DTYPES = ("fp16", "bf16")
LARGEST = 4 << 20  # bytes of a pyproject.toml
KEYS = ("select", "ignore", "per-file-ignores", "exclude", "device", "amp-dtype")


@dataclass(frozen=True)
class Config:
    root: str = ""  # the folder that patterns are relative to
    select: tuple[str, ...] = ()  # nothing, or "": everything
    ignore: tuple[str, ...] = ()
    per_file_ignores: tuple[tuple[str, tuple[str, ...]], ...] = ()
    exclude: tuple[str, ...] = ()
    device: str | None = None
    amp_dtype: str | None = None

    def wants(self, finding: Finding) -> bool:
        if self.select and not selects(finding.code, self.select):
            return False
        if selects(finding.code, self.ignore):
            return False
        return not any(
            selects(finding.code, codes) and matches_path(finding.file, (pattern,), self.root)
            for pattern, codes in self.per_file_ignores
        )


def find_config(path: str, top: str = "") -> Config:
    """Of the nearest folder above whose pyproject.toml has a `[tool.nanny]`; the defaults if there is none.

    With a `top` folder (a real path), no file outside it is read, not through a link either.
    """
    start = os.path.abspath(path)
    return _config_of(start if os.path.isdir(start) else os.path.dirname(start), top)


def forget_configs() -> None:
    """Reads the files again when asked next; they may have been edited."""
    _config_of.cache_clear()


@cache
def _config_of(folder: str, top: str = "") -> Config:
    file = os.path.join(folder, "pyproject.toml")
    is_inside = not top or os.path.realpath(file).startswith(os.path.join(top, ""))
    table = _table(file) if is_inside and os.path.isfile(file) else None
    if table is not None:
        return read_table(table, file)
    above = os.path.dirname(folder)
    return Config() if folder in (above, top) else _config_of(above, top)


def read_table(table: Any, file: str) -> Config:
    if not isinstance(table, dict):
        raise NannyError(f"{file}: [tool.nanny] must be a table")
    for key in table:
        if key not in KEYS:
            raise NannyError(f"{file}: unknown key {key!r} in [tool.nanny]; known are: {', '.join(KEYS)}")
    ignores = table.get("per-file-ignores", {})
    if not isinstance(ignores, dict):
        raise NannyError(f'{file}: per-file-ignores must be a table like {{ "tests/*" = ["NUM"] }}')
    where = f"{file}: "
    return Config(
        root=os.path.dirname(os.path.abspath(file)),
        select=known_codes(_strings(table, "select", file), where),
        ignore=known_codes(_strings(table, "ignore", file), where),
        per_file_ignores=tuple((name, known_codes(_strings(ignores, name, file), where)) for name in ignores),
        exclude=_strings(table, "exclude", file),
        device=device_name(table.get("device"), where),
        amp_dtype=amp_dtype_name(table.get("amp-dtype"), where),
    )


def known_codes(patterns: Iterable[str], where: str = "") -> tuple[str, ...]:
    """The patterns in upper case; one that no rule answers to is a typing mistake."""
    out = tuple(pattern.strip().upper() for pattern in patterns)
    if not out:
        return ()
    from ..core.numbers import nearest
    from .pages import checker_codes

    known = checker_codes()
    for pattern in out:
        if pattern == "ALL":
            continue
        if not pattern or not any(code.startswith(pattern) for code in known):
            raise NannyError(f"{where}no rule is called {pattern!r}{nearest(pattern, known)}; `nanny rule` lists all")
    return tuple("" if pattern == "ALL" else pattern for pattern in out)


def device_name(value: Any, where: str = "") -> str | None:
    if value is None or (isinstance(value, str) and value in DEVICES):
        return value
    raise NannyError(f"{where}device must be one of {_quote(DEVICES)}, not {value!r}")


def amp_dtype_name(value: Any, where: str = "") -> str | None:
    """The short name, also of `float16`, `torch.bfloat16` and `half`."""
    if value is None:
        return None
    try:
        name = format_of(value).name
    except NannyError:
        name = ""
    if name not in AMP_DTYPES:
        raise NannyError(f"{where}amp-dtype must be one of {_quote(AMP_DTYPES)}, not {value!r}")
    return name


def _strings(table: dict[str, Any], key: str, file: str) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise NannyError(f'{file}: {key} must be a list of strings like ["NUM", "SCALER"], not {value!r}')
    return tuple(value)


def _quote(names: Collection[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _table(file: str) -> Any:
    """The table, None if the file has none. Most files have none, and need not be parsed to know that."""
    try:
        data = read_regular(file, LARGEST)
    except OSError as error:
        raise NannyError(f"{file}: cannot be read ({error.strerror}); mend it or move it away") from error
    if b"nanny" not in data:
        return None
    try:
        tools = parsed_toml(data.decode()).get("tool", {})
    except (ValueError, RecursionError) as error:  # ValueError: not TOML, not UTF-8, or a number of thousands of digits
        raise NannyError(f"{file}: not valid TOML ({error}); fix it or move it away") from error
    return tools.get("nanny") if isinstance(tools, dict) else None  # what else stands there is not ours to judge
