"""Sections of settings files: DeepSpeed JSON, Accelerate YAML, Hugging Face training arguments, Lightning YAML.

Values come from the usual parsers, their places in the file from a second look, so that a finding points at its key.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.finding import Severity
from ...core.regular_files import parsed_toml

KeyPath = tuple[str | int, ...]
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
Span = tuple[int, int, int, int]  # row, column, end row, end column
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+')


@dataclass(frozen=True)
class SettingsSection:
    """One section of a file: whose settings they are, what they say, and where it stands."""

    framework: str  # deepspeed, accelerate, hf, lightning, titan (torchtitan and what copies its names)
    data: Mapping[str, Any]
    at: KeyPath = ()
    spans: Mapping[KeyPath, Span] = field(default_factory=dict)

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
    is_proven: bool = False  # as of a `Hit`


def recognise(data: Any, spans: Mapping[KeyPath, Span]) -> Iterator[SettingsSection]:
    """The sections that clearly belong to a known framework; most JSON and YAML files have none."""
    if not isinstance(data, Mapping):
        return
    if _is_deepspeed(data):
        yield SettingsSection("deepspeed", data, (), spans)
    elif _is_accelerate(data):
        yield SettingsSection("accelerate", data, (), spans)
    elif _is_trainer_target(data):
        yield SettingsSection("lightning", data, (), spans)
    elif _is_training_arguments(data):
        yield SettingsSection("hf", data, (), spans)
    for key, value in data.items():
        if not isinstance(value, Mapping):
            continue
        if _is_deepspeed(value):
            yield SettingsSection("deepspeed", value, (key,), spans)
        elif key == "trainer" and value.keys() & {"precision", "max_epochs", "max_steps", "accelerator", "devices"}:
            yield SettingsSection("lightning", value, (key,), spans)
        elif _is_training_arguments(value):
            yield SettingsSection("hf", value, (key,), spans)
        elif value.keys() & {"mixed_precision_param", "mixed_precision_reduce"}:
            yield SettingsSection("titan", value, (key,), spans)


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
    if not isinstance(target, str):
        return False
    package, _, name = target.partition(".")
    return package in _LIGHTNING and name.rpartition(".")[2] == "Trainer"


def json_document(text: str) -> tuple[Any, dict[KeyPath, Span]]:
    data = json.loads(text)
    return data, _json_spans(text)


def _json_spans(text: str) -> dict[KeyPath, Span]:
    """Where each key of valid JSON stands: from the key to the end of its value, if that is on the same line."""
    spans: dict[KeyPath, Span] = {}
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


def toml_document(text: str) -> tuple[Any, dict[KeyPath, Span]]:
    data = parsed_toml(text)
    spans: dict[KeyPath, Span] = {}
    table: KeyPath = ()
    for row, line in enumerate(text.split("\n"), 1):
        header = re.match(r"\s*\[([\w.\-]+)\]", line)
        key = re.match(r"(\s*)([\w\-]+)\s*=", line)
        if header:
            table = tuple(header[1].split("."))
            spans.setdefault(table, (row, 1, row, len(line) + 1))
        elif key:
            inner: KeyPath = (*table, key[2])
            spans[inner] = (row, len(key[1]) + 1, row, len(line.rstrip()) + 1)
    return data, spans


def yaml_documents(text: str) -> Iterator[tuple[Any, dict[KeyPath, Span]]]:
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
            spans: dict[KeyPath, Span] = {}
            _yaml_spans(node, (), spans, set())
            yield data, spans
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from error


def _yaml_spans(node: Any, path: KeyPath, spans: dict[KeyPath, Span], seen: set[int]) -> None:
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
