"""From the text of a settings file to findings. Only a file that clearly is one is judged."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from ...core.finding import Finding, Link
from ..broken import broken_code
from ..credit import loudest
from ..registry import rules_on
from ..walk import KINDS, settings_named
from . import rules  # noqa: F401  (enters its rules)
from .sections import KeyPath, SettingsSection, Span, json_document, recognise, toml_document, yaml_documents

_WORTH_IT = re.compile(r"fp16|bf16|float16|precision|loss_scale|scale_power")  # a file without has nothing to judge


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
    """What the settings file says that code in `importer` names."""
    found = settings_named(name, importer)
    return _read(*found) if found is not None else None


def _read(path: str, text: str) -> tuple[str, Any, Mapping[KeyPath, Span]] | None:
    try:
        documents = list(_documents(text, KINDS[os.path.splitext(path)[1].lower()]))
    except (ValueError, RecursionError):
        return None
    return (path, *documents[0]) if documents else None


@lru_cache(64)
def sections_of(texts: tuple[tuple[str, str], ...]) -> tuple[tuple[str, SettingsSection], ...]:
    """The sections of settings files, each with its file."""
    read = (_read(path, text) for path, text in texts)
    return tuple((found[0], section) for found in read if found is not None for section in recognise(*found[1:]))


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
                severity=loudest(rule.code, problem.severity or rule.severity, is_proven=problem.is_proven),
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
