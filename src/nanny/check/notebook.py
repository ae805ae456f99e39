"""Notebooks: the code cells as one Python source, and the way back from its lines to cell and line.

Cells share their names, so they are checked together. IPython's own syntax (`%magic`, `!command`, `name?`) is replaced by
`pass`; a cell that still does not parse is reported and left out, the others go on.
"""

from __future__ import annotations

import ast
import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..core.finding import Finding, Link

# IPython takes these words at the start of a line for commands, as long as no variable has their name
_COMMANDS = "alias cat cd clear cp env ldir less lf lk ll ls lx man mkdir more mv pip conda popd pushd pwd rm rmdir"
PYTHON_MAGICS = frozenset(("%%time", "%%timeit", "%%capture", "%%prun", "%%python", "%%python3"))
_MAGIC_LINE = re.compile(r"^(\s*)(?:[%!].*|\?+\s*[\w.]+.*|[\w.]+\?+\s*)$")
_MAGIC_VALUE = re.compile(r"^(\s*[\w.,\s\[\]'\"]+=\s*)[%!].*$")
_COMMAND_LINE = re.compile(rf"^(\s*)(?:{'|'.join(_COMMANDS.split())})(?:\s+[^\s=(\[.,:+*/%].*|\s+[./~*].*)$")
_LINE_IN_TEXT = re.compile(r"\blines? (\d+)(?:(-| to | and )(\d+))?\b")


@dataclass(frozen=True)
class Cell:
    number: int  # 1-based among all cells, as Jupyter shows them
    first: int  # its first line in the source
    lines: tuple[str, ...]
    indent: int = 0  # taken off all its lines


@dataclass(frozen=True)
class Notebook:
    source: str
    cells: tuple[Cell, ...]
    broken: tuple[tuple[Cell, SyntaxError], ...]

    def cell_at(self, row: int) -> Cell:
        return self.cells[max(bisect_right([cell.first for cell in self.cells], row) - 1, 0)]


def read_notebook(text: str) -> Notebook | None:
    """None for a notebook in another language than Python. Raises ValueError if it is no notebook at all."""
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("a notebook is a JSON object with cells")
    if _language(data) not in ("python", ""):
        return None
    cells: list[Cell] = []
    broken: list[tuple[Cell, SyntaxError]] = []
    out: list[str] = []
    for number, code in _code_cells(data):
        lines = tuple(code.split("\n"))
        cell = Cell(number, len(out) + 1, lines)
        try:
            python, indent = _as_python(lines)
            cell = replace(cell, indent=indent)
            out += python
        except SyntaxError as error:
            broken.append((cell, error))
            out += [""] * len(lines)
        cells.append(cell)
    return Notebook("\n".join(out) + "\n", tuple(cells), tuple(broken))


def in_cell(finding: Finding, notebook: Notebook) -> Finding:
    """The finding with cell and line within it, in the message too."""
    cell = notebook.cell_at(finding.line or 1)
    return replace(
        finding,
        cell=cell.number,
        line=(finding.line or 1) - cell.first + 1,
        column=None if finding.column is None else finding.column + cell.indent,
        end_line=None if finding.end_line is None else finding.end_line - cell.first + 1,
        end_column=None if finding.end_column is None else finding.end_column + cell.indent,
        chain=tuple(_link_in_cell(link, notebook) for link in finding.chain),
        message=_lines_in_cells(finding.message, notebook),
        hint=_lines_in_cells(finding.hint, notebook),
    )


def _link_in_cell(link: Link, notebook: Notebook) -> Link:
    cell = notebook.cell_at(link.line)
    return replace(link, cell=cell.number, line=link.line - cell.first + 1, what=_lines_in_cells(link.what, notebook))


def _lines_in_cells(text: str, notebook: Notebook) -> str:
    def name(row: str) -> str:
        cell = notebook.cell_at(int(row))
        return f"cell {cell.number}, line {int(row) - cell.first + 1}"

    def put(match: re.Match[str]) -> str:
        return name(match[1]) + (f" to {name(match[3])}" if match[3] else "")

    return _LINE_IN_TEXT.sub(put, text)


def _language(data: dict[str, Any]) -> str:
    metadata = data.get("metadata")
    if not isinstance(metadata, dict):
        return ""
    for section, key in (("language_info", "name"), ("kernelspec", "language")):
        part = metadata.get(section)
        if isinstance(part, dict) and isinstance(part.get(key), str):
            return str(part[key]).lower().replace("ipython", "python").rstrip("23")
    return ""


def _code_cells(data: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """(number, code), from notebooks of format 4 and of format 3 (worksheets)."""
    cells = data.get("cells")
    if cells is None:
        sheets = data.get("worksheets") or []
        cells = [cell for sheet in sheets if isinstance(sheet, dict) for cell in sheet.get("cells") or []]
    if not isinstance(cells, list):
        raise ValueError("a notebook is a JSON object with cells")
    for number, cell in enumerate(cells, 1):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        code = cell.get("source", cell.get("input", ""))
        yield number, "".join(map(str, code)) if isinstance(code, list) else str(code)


def _as_python(lines: tuple[str, ...]) -> tuple[list[str], int]:
    """As many lines, and the indent taken off them; raises SyntaxError if they are not Python even without the magics."""
    first = next((line.strip() for line in lines if line.strip()), "")
    if first.startswith("%%"):
        if first.split()[0] not in PYTHON_MAGICS:
            return [""] * len(lines), 0
        at = next(i for i, line in enumerate(lines) if line.strip())
        lines = (*lines[:at], "", *lines[at + 1 :])
    for attempt in (lines, _without_magics(lines), _without_magics(lines, _COMMAND_LINE)):
        python, indent = _dedent(attempt)
        try:
            ast.parse("\n".join(python))
        except SyntaxError as error:
            problem = error
        except (ValueError, RecursionError, MemoryError) as error:
            raise SyntaxError(str(error) or "nested too deeply") from error
        else:
            return python, indent
    raise problem


def _without_magics(lines: tuple[str, ...], commands: re.Pattern[str] | None = None) -> tuple[str, ...]:
    """`pass` for each line that is IPython's, and nothing for those that continue it with a backslash."""
    out: list[str] = []
    is_continued = False
    for line in lines:
        if is_continued:
            new = ""
        else:
            new = _MAGIC_VALUE.sub(r"\1None", _MAGIC_LINE.sub(r"\1pass", line))
            new = commands.sub(r"\1pass", new) if commands is not None else new
        out.append(new)
        is_continued = (is_continued or new != line) and line.rstrip().endswith("\\")
    return tuple(out)


def _dedent(lines: tuple[str, ...]) -> tuple[list[str], int]:
    """Without the indent of the first line of code, as IPython runs a cell."""
    first = next((line for line in lines if line.strip() and not line.lstrip().startswith("#")), "")
    indent = first[: len(first) - len(first.lstrip())]
    return [line[len(indent) :] if indent and line.startswith(indent) else line for line in lines], len(indent)
