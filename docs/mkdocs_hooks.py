"""What mkdocs needs to know beyond docs/ (a hook of mkdocs.yml): `make site`.

The documents of the repository link to each other as files, so that they work in an editor and on a code host. Here the Markdown
files outside docs/ become pages of the site, and other files that a page links to are copied beside them.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?\)")
KNOWLEDGE = "src/nanny/diagnose/knowledge"
HOMES = {"README.md": "index.md", "README.zh-CN.md": "index.zh-CN.md"}


def home_of(path: str) -> str:
    """Where a file of the repository lies in the site."""
    if path in HOMES:
        return HOMES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith(f"{KNOWLEDGE}/"):
        return path.replace(KNOWLEDGE, "causes")
    return f"repository/{path}"


def carried() -> list[str]:
    """The files outside docs/ that become pages."""
    pages = [*ROOT.glob("*.md"), *(ROOT / KNOWLEDGE).glob("*/*.md")]
    return sorted(page.relative_to(ROOT).as_posix() for page in pages)


def linked(path: str) -> list[str]:
    """The files that a file of the repository links to."""
    found = (match[2] for match in LINK.finditer((ROOT / path).read_text(encoding="utf-8")))
    targets = (posixpath.normpath(posixpath.join(posixpath.dirname(path), target)) for target in found)
    return [target for target in targets if (ROOT / target).is_file()]


def on_files(files: Any, config: Any) -> Any:
    here = [f"docs/{page.src_uri}" for page in files.documentation_pages()]
    pages = carried()
    for path in dict.fromkeys([*pages, *(target for page in [*here, *pages] for target in linked(page))]):
        if files.get_file_from_path(home_of(path)) is None:
            files.append(File.generated(config, home_of(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    source = Path(page.file.abs_src_path).relative_to(ROOT).as_posix()
    folder = posixpath.dirname(page.file.src_uri) or "."

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        if not (ROOT / target).is_file():
            return match[0]
        return f"{match[1]}{posixpath.relpath(home_of(target), folder)}{match[3] or ''})"

    return LINK.sub(moved, markdown)
