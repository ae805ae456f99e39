"""Settings files: DeepSpeed JSON, Accelerate YAML, Hugging Face training arguments, Lightning YAML.

Only a file that clearly is one of these is judged; the rules are in `settings_rules.py`. Values come from the usual parsers,
their places in the file from a second look, so that a finding points at its key.
"""

from __future__ import annotations

import importlib.util
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.finding import Finding, NannyError, Severity
from .broken import broken_code

Path = tuple[str | int, ...]
Span = tuple[int, int, int, int]  # row, column, end row, end column
_WORTH_IT = re.compile(r"fp16|bf16|float16|precision|loss_scale|scale_power")
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+')
NEEDS_YAML = "reading YAML needs pyyaml; type: pip install 'precision-nanny[yaml]'"


@dataclass(frozen=True)
class Settings:
    """One section of a file: whose settings they are, what they say, and where it stands."""

    framework: str  # deepspeed, accelerate, hf, lightning
    data: Mapping[str, Any]
    at: Path = ()
    spans: Mapping[Path, Span] = field(default_factory=dict)

    def get(self, *keys: str) -> Any:
        """The value below these keys, None where there is none."""
        value: Any = self.data
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def section(self, *keys: str) -> Mapping[str, Any]:
        value = self.get(*keys)
        return value if isinstance(value, Mapping) else {}

    def span(self, *keys: str) -> Span:
        return self.spans.get((*self.at, *keys), (1, 1, 1, 1))

    def row(self, *keys: str) -> int:
        return self.span(*keys)[0]


@dataclass(frozen=True)
class Problem:
    """What a settings rule yields: the keys it is about, and what to say."""

    keys: tuple[str, ...]
    message: str
    hint: str
    severity: Severity | None = None


def check_settings(text: str, path: str, kind: str, named: bool) -> list[Finding] | str | None:
    """Findings; a sentence if the user's own choice of file cannot be judged; None for a file of another purpose."""
    if not _WORTH_IT.search(text):
        return f"{path}: says nothing about precision, so there is nothing to check" if named else None
    if kind == "yaml" and importlib.util.find_spec("yaml") is None:
        if named:
            raise NannyError(f"{path}: {NEEDS_YAML}")
        return f"{path}: skipped, {NEEDS_YAML}"
    try:
        documents = list(_yaml_documents(text)) if kind == "yaml" else [_json_document(text)]
    except (ValueError, RecursionError) as error:
        if "{{" in text or "{%" in text:
            return f"{path}: skipped, it is a template" if named else None
        return [broken_code(_as_syntax_error(error, kind), path, reader="")] if named else None
    sections = [s for data, spans in documents for s in recognise(data, spans)]
    if not sections:
        return f"{path}: not the settings of DeepSpeed, Accelerate, Trainer or Lightning" if named else None
    return [finding for section in sections for finding in _judge(section, path)]


def recognise(data: Any, spans: Mapping[Path, Span]) -> Iterator[Settings]:
    """The sections that clearly belong to a known framework; most JSON and YAML files have none."""
    if not isinstance(data, Mapping):
        return
    if _is_deepspeed(data):
        yield Settings("deepspeed", data, (), spans)
    elif _is_accelerate(data):
        yield Settings("accelerate", data, (), spans)
    elif _is_trainer_target(data):
        yield Settings("lightning", data, (), spans)
    elif _is_training_arguments(data):
        yield Settings("hf", data, (), spans)
    for key, value in data.items():
        if not isinstance(value, Mapping):
            continue
        if _is_deepspeed(value):
            yield Settings("deepspeed", value, (key,), spans)
        elif key == "trainer" and value.keys() & {"precision", "max_epochs", "max_steps", "accelerator", "devices"}:
            yield Settings("lightning", value, (key,), spans)
        elif _is_training_arguments(value):
            yield Settings("hf", value, (key,), spans)


def _judge(section: Settings, path: str) -> Iterator[Finding]:
    from . import settings_rules  # noqa: F401  (enters its rules)
    from .registry import rules_on

    for rule in rules_on("settings"):
        problems: Iterable[Any] = rule.function(section)  # Problem, where rules on code yield Hit
        for problem in problems:
            row, column, end_row, end_column = section.span(*problem.keys)
            yield Finding(
                code=rule.code,
                severity=problem.severity or rule.severity,
                message=problem.message,
                hint=problem.hint,
                file=path,
                line=row,
                column=column,
                end_line=end_row,
                end_column=end_column,
                evidence={"key": ".".join(map(str, (*section.at, *problem.keys)))},
            )


def _is_deepspeed(data: Mapping[str, Any]) -> bool:
    if isinstance(data.get("zero_optimization"), Mapping) or "train_micro_batch_size_per_gpu" in data:
        return True
    halves = [data[key] for key in ("fp16", "bf16", "bfloat16") if isinstance(data.get(key), Mapping)]
    return any("enabled" in half or "initial_scale_power" in half for half in halves)


def _is_accelerate(data: Mapping[str, Any]) -> bool:
    return "distributed_type" in data and bool(data.keys() & {"compute_environment", "num_processes", "machine_rank"})


def _is_training_arguments(data: Mapping[str, Any]) -> bool:
    if "per_device_train_batch_size" in data:
        return True
    others = {"num_train_epochs", "learning_rate", "gradient_accumulation_steps", "max_steps", "save_steps"}
    return "output_dir" in data and bool(data.keys() & others)


def _is_trainer_target(data: Mapping[str, Any]) -> bool:
    target = data.get("_target_", data.get("class_path"))
    return isinstance(target, str) and "lightning" in target and target.endswith("Trainer")


def _json_document(text: str) -> tuple[Any, dict[Path, Span]]:
    data = json.loads(text)
    return data, _json_spans(text)


def _json_spans(text: str) -> dict[Path, Span]:
    """Where each key of valid JSON stands: from the key to the end of its value, if that is on the same line."""
    spans: dict[Path, Span] = {}
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    levels: list[tuple[bool, str | int]] = []  # (is it an object, the key or index we are at)
    before: re.Match[str] | None = None
    for token in _JSON_TOKEN.finditer(text):
        kind = token[0][0]
        path = tuple(at for _, at in levels)
        if before is not None and before[0] == ":" and kind not in "{[":
            end = _place(token.end(), starts)
            if end[0] == spans[path][0]:
                spans[path] = (*spans[path][:2], *end)
        if kind in "{[":
            levels.append((kind == "{", 0))
        elif kind in "}]":
            levels.pop()
        elif kind == "," and levels and not levels[-1][0]:
            levels[-1] = (False, int(levels[-1][1]) + 1)
        elif kind == ":" and before is not None:
            levels[-1] = (True, json.loads(before[0]))
            path = tuple(at for _, at in levels)
            spans[path] = (*_place(before.start(), starts), *_place(before.end(), starts))
        before = token
    return spans


def _place(offset: int, starts: list[int]) -> tuple[int, int]:
    row = bisect_right(starts, offset)
    return row, offset - starts[row - 1] + 1


def _yaml_documents(text: str) -> Iterator[tuple[Any, dict[Path, Span]]]:
    """Unknown tags (`!include`) are read as nothing; the rest of the file can still be judged."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("", lambda loader, suffix, node: None)
    try:
        loader = Loader(text)
        while loader.check_node():
            node = loader.get_node()
            data = loader.construct_document(node)
            spans: dict[Path, Span] = {}
            _yaml_spans(node, (), spans, set())
            yield data, spans
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from error


def _yaml_spans(node: Any, path: Path, spans: dict[Path, Span], seen: set[int]) -> None:
    if id(node) in seen:  # an alias: its anchor has been looked at
        return
    seen.add(id(node))
    if node.id == "sequence":
        for index, item in enumerate(node.value):
            _yaml_spans(item, (*path, index), spans, seen)
    elif node.id == "mapping":
        for key, value in node.value:
            if key.id != "scalar":
                continue
            start, end = key.start_mark, (value if value.id == "scalar" else key).end_mark
            end = end if end.line == start.line else key.end_mark
            inner = (*path, key.value)
            spans[inner] = (start.line + 1, start.column + 1, end.line + 1, end.column + 1)
            _yaml_spans(value, inner, spans, seen)


def _as_syntax_error(error: Exception, kind: str) -> SyntaxError:
    problem = SyntaxError(f"not valid JSON: {error}" if kind == "json" else str(error))
    if isinstance(error, json.JSONDecodeError):
        problem.lineno, problem.offset = error.lineno, error.colno
    return problem
