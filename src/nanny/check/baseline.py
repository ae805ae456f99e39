"""The findings that old code is allowed to keep: `--write-baseline FILE` once, `--baseline FILE` from then on.

A finding is known by file, code and the text of its line, not by the line's number: code may move. If the same line has the
finding three times in the baseline and four times now, one is new.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence

from ..core.finding import Finding, NannyError
from ..core.plain_json import to_text
from ..core.regular_files import read_regular
from ..show.findings import Lines
from ..show.reports import relative

VERSION = 1
LARGEST = 64 << 20  # bytes that are read
Key = tuple[str, str, str]  # file, code, text


def write_baseline(path: str, findings: Sequence[Finding], lines: Lines) -> None:
    counts = Counter(_key(finding, lines, path) for finding in findings)
    entries = [{"file": file, "code": code, "text": text, "count": count} for (file, code, text), count in sorted(counts.items())]
    try:
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(to_text({"version": VERSION, "findings": entries}) + "\n")
    except OSError as error:
        raise NannyError(f"{path}: the baseline cannot be written ({error.strerror})") from error


def read_baseline(path: str) -> Counter[Key]:
    try:
        data = json.loads(read_regular(path, LARGEST))
        if data["version"] != VERSION:
            raise NannyError(f"{path}: baseline of version {data['version']}, this nanny reads {VERSION}; write it again")
        return Counter({(str(e["file"]), str(e["code"]), str(e["text"])): int(e["count"]) for e in data["findings"]})
    except FileNotFoundError:
        raise NannyError(f"{path}: no such baseline; write one with --write-baseline {path}") from None
    except OSError as error:
        raise NannyError(f"{path}: the baseline cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise NannyError(f"{path}: not a baseline of nanny; write one with --write-baseline FILE and name that") from None


def new_findings(
    findings: Sequence[Finding], lines: Lines, path: str, known: Counter[Key], files: Sequence[str]
) -> tuple[list[Finding], int]:
    """Findings beyond the baseline, and how many of the baseline's do not occur any more in the files that were checked."""
    left = known.copy()
    new = []
    for finding in findings:
        key = _key(finding, lines, path)
        if left[key] > 0:
            left[key] -= 1
        else:
            new.append(finding)
    checked = {_file(file, path) for file in files}
    return new, sum(count for (file, _, _), count in left.items() if file in checked)


def _key(finding: Finding, lines: Lines, path: str) -> Key:
    source = lines.get((finding.file, finding.cell), ())
    row = (finding.line or 1) - 1
    text = " ".join(source[row].split()) if row < len(source) else ""
    return _file(finding.file, path), finding.code, text


def _file(file: str, path: str) -> str:
    """As seen from the baseline's folder, so that both may be checked out elsewhere."""
    return relative(file, os.path.dirname(os.path.abspath(path)))
