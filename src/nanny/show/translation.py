"""What is said in two languages: one catalogue (`assets/zh.txt`), English line above Chinese line.

Sentences are built in English, where their numbers are known, and looked up by it when they are shown: no text decides anything.
What a screen says of itself has a name there, `[room.name]`, and is asked for by it: `words_of("page", "zh")`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_LABELS = {"largest ": "最大 ", "1 % below ": "1 % 低于 "}  # in a figure, before a number


# What a text is put together with, longest first: between clauses, around an addition, along a chain.
_JOINTS = ((" -> ", " -> "), ("; ", "；"), (": ", "："), (". ", "。"), (", ", "，"), (" (", "（"))
_NAMED = r"\[\w+\.[^]]+\] "  # expressions are compiled by who needs them: most commands speak English
_BETWEEN_CHINESE = "(?<=[\u4e00-\u9fff]) (?=[\u4e00-\u9fff])"  # the space around a gap is for names and numbers
FEWEST_LETTERS = 3  # in what is looked up at all
_WITHIN = r"((?:\([^()]*\)|(?!; |, (?!`)| -> |\. ).)+?)"  # a gap stays within its clause, the first also behind no colon ...
_FIRST = _WITHIN.replace("; |", "; |: |")
_BRACKETED = r"((?:[^()]|\([^()]*\))+?)"  # a call in it has brackets of its own
_ANYTHING = "(.+)"  # ... but what stands behind a colon may be a whole sentence


@dataclass(frozen=True)
class _Entry:
    key: str  # the longest part of the English that is fixed: what is not in a text cannot match it
    pattern: str  # compiled when it is needed: nine hundred would take longer than the page that asks for thirty
    chinese: str


@lru_cache(maxsize=1)
def _pairs() -> list[tuple[str, str]]:
    from importlib import resources  # slow to import, and most of what is said in English needs none

    text = resources.files("nanny.show").joinpath("assets/zh.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return list(zip(lines[::2], lines[1::2]))


@lru_cache(maxsize=16)
def words_of(room: str, lang: str) -> Mapping[str, str]:
    """Name -> what a screen says under it."""
    start = f"[{room}."
    named = [
        (*english.removeprefix(start).partition("] ")[::2], chinese) for english, chinese in _pairs() if english.startswith(start)
    ]
    return {name: chinese if lang == "zh" else english for name, english, chinese in named}


@lru_cache(maxsize=1)
def _catalogue() -> tuple[dict[str, str], list[_Entry]]:
    """Texts without gaps, and those with gaps, the most specific first."""
    whole, gapped = _remedies(), []
    whole |= {english.removesuffix("."): chinese.removesuffix("。") for english, chinese in whole.items()}
    for english, chinese in _pairs():
        if named := re.match(_NAMED, english):
            if named[0].startswith(("[verdict.", "[page.one.")):  # which are cells of tables too
                whole[english[named.end() :]] = chinese
            continue
        parts = re.split(r"\{\d\}", english.removesuffix("."))
        whole[english] = chinese
        whole.setdefault(english.removesuffix("."), chinese.removesuffix("。"))
        if len(parts) > 1:
            fixed = list(map(re.escape, parts))
            pattern = fixed[0] + "".join(map(_gap, parts, parts[1:]))
            gapped.append((sum(map(len, parts)), _Entry(max(parts, key=len), pattern, chinese.removesuffix("。"))))
    return whole, [entry for _, entry in sorted(gapped, key=lambda pair: -pair[0])]


def _gap(before: str, after: str) -> str:
    """What stands between two fixed parts, and the second of them."""
    inner = _BRACKETED if before.endswith("(") else _ANYTHING if not after and before.endswith(": ") else _WITHIN
    inner = inner if before else _FIRST
    return inner + re.escape(after)


def _remedies() -> dict[str, str]:
    """What the pages of the causes say in both languages is written there, and nowhere else."""
    from ..diagnose.knowledge import causes

    chinese = causes("zh")
    pairs = [(page, chinese[name]) for name, page in causes("en").items() if name in chinese]
    return {en.remedy: zh.remedy for en, zh in pairs} | {en.title: zh.title for en, zh in pairs}


def translate(text: str, lang: str | None) -> str:
    """The text in the reader's language: as a whole, else clause by clause, and as it is where the catalogue has no line."""
    return _chinese(text) if lang == "zh" else text


@lru_cache(maxsize=4096)
def _chinese(text: str) -> str:
    if len(text.strip()) < FEWEST_LETTERS or not any(char.isascii() and char.isalpha() for char in text):
        return text
    whole, gapped = _catalogue()
    if text.strip() != text:
        start = text.index(text.strip())
        return text[:start] + _chinese(text.strip()) + text[start + len(text.strip()) :]
    if text in whole:
        return whole[text]
    if text[-1] == ".":
        shorter = _chinese(text[:-1])
        return text if shorter == text[:-1] else f"{shorter}。"
    near = [entry for entry in gapped if entry.key in text]
    found = next((match for entry in near if (match := _fill(entry, text))), "")
    found = found or _by_clauses(text, every=True)
    if not found and text[-1] == ":" and (shorter := _chinese(text[:-1])) != text[:-1]:
        return f"{shorter}："
    return found or _by_clauses(text) or text


@lru_cache(maxsize=1024)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


def _fill(entry: _Entry, text: str) -> str:
    found = _compile(entry.pattern).fullmatch(text)
    if found is None:
        return ""
    text = entry.chinese.format(*("0" if group == "no" else _chinese(group) for group in found.groups()))
    return re.sub(_BETWEEN_CHINESE, "", text)


def _by_clauses(text: str, every: bool = False) -> str:
    """Empty where no clause is known, or (`every`) where one with words in it is not."""
    for joint, chinese in _JOINTS:
        parts = text.split(joint)
        if len(parts) == 1:
            continue
        closes = joint == " (" and len(parts) == 2 and parts[1].endswith(")")
        if joint == " (" and not closes:
            continue
        inner = [parts[0], parts[1][:-1]] if closes else parts
        shown = [_chinese(part) for part in inner]
        unknown = any(a == b and re.search("[a-z]{3} [a-z]", a) for a, b in zip(inner, shown))
        if shown != inner and not (every and unknown):
            return chinese.join(shown) + ("）" if closes else "")
    return ""


def with_label(label: str, text: str, lang: str | None) -> str:
    """`Clearance: 6.8 bits left`: Chinese has a colon of its own, which is as wide as a space behind it."""
    return f"{label}：{text}" if lang == "zh" else f"{label}: {text}"


def _label(text: str, lang: str | None) -> str:
    for english, chinese in _LABELS.items():
        if lang == "zh" and text.startswith(english):
            return chinese + text.removeprefix(english)
    return text


def translate_figure(figure: Mapping[str, Any], lang: str | None) -> dict[str, Any]:
    """A figure as JSON with its axes, legend and labels translated; layers' names stand in other fields."""
    data = [{**trace, "name": translate(trace["name"], lang)} if "name" in trace else dict(trace) for trace in figure["data"]]
    layout = dict(figure["layout"])
    titled = [(layout, key) for key in layout if re.fullmatch(r"[xy]axis\d*", key)]
    for part, key in [*titled, *((trace, "colorbar") for trace in data if "colorbar" in trace)]:
        title = part[key].get("title")
        if title and "text" in title:
            part[key] = {**part[key], "title": {**title, "text": translate(title["text"], lang)}}
    if "annotations" in layout:
        layout["annotations"] = [{**label, "text": _label(label.get("text", ""), lang)} for label in layout["annotations"]]
    return {**figure, "data": data, "layout": layout}
