"""From the text of a settings file to findings. Only a file that clearly is one is judged."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from ...core.finding import Finding, Link
from ..broken import broken_code
from ..credit import loudest
from ..registry import rules_on
from ..walk import KINDS, Found, Text, folders_up, read_text
from . import rules  # noqa: F401  (enters its rules)
from .sections import KeyPath, SettingsSection, Span, json_document, recognise, toml_document, yaml_documents

_WORTH_IT = re.compile(r"fp16|bf16|float16|precision|loss_scale|scale_power")  # a file without has nothing to judge
LONGEST_SETTINGS = 1 << 16  # bytes; what is longer is data


def check_settings(text: str, path: str, kind: str, named: bool) -> list[Finding] | str | None:
    """Findings; a sentence if the user's own choice of file cannot be judged; None for a file of another purpose."""
    if not _WORTH_IT.search(text):
        return f"{path}: says nothing about precision, so there is nothing to check" if named else None
    try:
        documents = list(_documents(text, kind))
    except (ValueError, RecursionError) as error:
        if "{{" in text or "{%" in text:
            return f"{path}: skipped, it is a template" if named else None
        return [broken_code(_as_syntax_error(error, kind), path, reader="")] if named else None
    sections = [s for data, spans in documents for s in recognise(data, spans)]
    if not sections:
        return f"{path}: not the settings of DeepSpeed, Accelerate, Trainer or Lightning" if named else None
    return [finding for section in sections for finding in _judge(section, path)]


def read_settings(name: str, importer: str) -> tuple[str, Any, Mapping[KeyPath, Span]] | None:
    """A settings file that code in `importer` names, looked for beside it and in the folders above."""
    kind = KINDS.get(os.path.splitext(name)[1].lower(), "")
    if kind not in ("json", "yaml", "toml") or os.path.isabs(name):
        return None
    for folder in folders_up(importer):
        path = os.path.normpath(os.path.join(folder, name))
        text = read_text(Found(path, kind)) if os.path.isfile(path) else None
        if isinstance(text, Text):
            try:
                documents = list(_documents(text.text, kind))
            except (ValueError, RecursionError):
                return None
            return (path, *documents[0]) if documents else None
    return None


@cache
def settings_in(folder: str) -> tuple[tuple[str, SettingsSection], ...]:
    """The sections of the settings files right in a folder, each with its file."""
    out: list[tuple[str, SettingsSection]] = []
    try:
        with os.scandir(folder or os.curdir) as entries:
            names = sorted(e.name for e in entries if e.is_file() and e.stat().st_size <= LONGEST_SETTINGS)
    except OSError:
        return ()
    for name in names:
        found = read_settings(name, os.path.join(folder, name))
        if found is not None:
            path, data, spans = found
            out += [(path, section) for section in recognise(data, spans)]
    return tuple(out)


def _documents(text: str, kind: str) -> Iterable[tuple[Any, Mapping[KeyPath, Span]]]:
    if kind == "yaml":
        return yaml_documents(text)
    return [json_document(text) if kind == "json" else toml_document(text)]


def _judge(section: SettingsSection, path: str) -> Iterator[Finding]:
    for rule in rules_on("settings"):
        problems: Iterable[Any] = rule.function(section)  # Problem, where rules on code yield Hit
        for problem in problems:
            row, column, end_row, end_column = section.span(*problem.keys)
            key = ".".join(map(str, (*section.at, *problem.keys)))
            yield Finding(
                code=rule.code,
                severity=loudest(rule.code, problem.severity or rule.severity),
                message=problem.message,
                hint=problem.hint,
                file=path,
                line=row,
                column=column,
                end_line=end_row,
                end_column=end_column,
                evidence={"key": key},
                chain=(Link(path, row, f"`{key}` is set here"),),
            )


def _as_syntax_error(error: Exception, kind: str) -> SyntaxError:
    problem = SyntaxError(f"not valid JSON: {error}" if kind == "json" else str(error))
    if isinstance(error, json.JSONDecodeError):
        problem.lineno, problem.offset = error.lineno, error.colno
    return problem
