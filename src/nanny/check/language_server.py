"""`nanny lsp`: the checker in an editor, over standard input and output. Findings as you type, their pages on hover, quick fixes.

Of the disk only files are read that the open document imports and that lie below the workspace's folder; nothing is run.
"""

from __future__ import annotations

import ast
import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from ..core.command_line import Parser
from ..core.finding import Finding, NannyError, Severity

try:
    from lsprotocol import types as lsp
    from pygls.lsp.server import LanguageServer
    from pygls.uris import to_fs_path
    from pygls.workspace import TextDocument

    from .tree import Edit
except ImportError:
    raise NannyError("`nanny lsp` needs pygls and libcst: pip install 'precision-nanny[lsp]'") from None

from .. import __version__
from .config import find_config, forget_configs
from .files import BatchCheck, Report, Sources
from .fix import fix_all, good_changes
from .pages import checker_pages
from .walk import LARGEST, Found, Text, matches_path, read_text

QUIET_SECONDS = 0.3  # without a key pressed, before a document is checked again
MOST_IMPORTS = 200  # files that one document brings in
SEVERITIES = {
    Severity.ERROR: lsp.DiagnosticSeverity.Error,
    Severity.WARNING: lsp.DiagnosticSeverity.Warning,
    Severity.INFO: lsp.DiagnosticSeverity.Information,
}


@dataclass
class Open:
    """A document in the editor: what was found in it, and the check that waits for the user to stop typing."""

    findings: list[Finding] = field(default_factory=list)
    version: int | None = None
    waiting: asyncio.Task[None] | None = None


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="nanny lsp", description="The checker as a language server, for editors; it speaks over stdin and stdout."
    )
    parser.add_argument("--stdio", action="store_true", help="what it does anyway; many editors say so")
    parser.parse_args(list(argv))
    make_server().start_io()
    return 0


def make_server() -> LanguageServer:
    server = LanguageServer("nanny", __version__)
    documents: dict[str, Open] = {}
    worker = ThreadPoolExecutor(1)  # the engine is one at a time; the editor goes on meanwhile

    async def look(uri: str, after: float) -> None:
        await asyncio.sleep(after)
        document = server.workspace.get_text_document(uri)
        version, text = document.version, plain(document.source)
        try:
            found = await asyncio.get_running_loop().run_in_executor(worker, findings_in, *_place(server, uri), text)
        except NannyError as error:  # pyproject.toml while it is edited
            server.window_log_message(lsp.LogMessageParams(lsp.MessageType.Warning, str(error)))
            return
        state = documents.get(uri)
        if state is not None and server.workspace.get_text_document(uri).version == version:
            state.findings, state.version = found, version
            shown = [_diagnostic(document, finding) for finding in found]
            server.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri, shown, version))

    def look_soon(uri: str, after: float) -> None:
        state = documents.setdefault(uri, Open())
        if state.waiting is not None:
            state.waiting.cancel()
        state.waiting = asyncio.get_running_loop().create_task(look(uri, after))

    @server.feature(lsp.TEXT_DOCUMENT_DID_OPEN)
    async def opened(params: lsp.DidOpenTextDocumentParams) -> None:
        look_soon(params.text_document.uri, 0)

    @server.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)
    async def changed(params: lsp.DidChangeTextDocumentParams) -> None:
        look_soon(params.text_document.uri, QUIET_SECONDS)

    @server.feature(lsp.TEXT_DOCUMENT_DID_SAVE)
    async def saved(params: lsp.DidSaveTextDocumentParams) -> None:
        forget_configs()
        look_soon(params.text_document.uri, 0)

    @server.feature(lsp.TEXT_DOCUMENT_DID_CLOSE)
    async def closed(params: lsp.DidCloseTextDocumentParams) -> None:
        state = documents.pop(params.text_document.uri, None)
        if state is not None and state.waiting is not None:
            state.waiting.cancel()
        server.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(params.text_document.uri, []))

    @server.feature(lsp.TEXT_DOCUMENT_HOVER)
    def hover(params: lsp.HoverParams) -> lsp.Hover | None:
        uri = params.text_document.uri
        document = server.workspace.get_text_document(uri)
        for finding in documents.get(uri, Open()).findings:
            place = _range(document, finding)
            if place.start <= params.position <= place.end:
                return lsp.Hover(lsp.MarkupContent(lsp.MarkupKind.Markdown, page_of(finding)), place)
        return None

    @server.feature(
        lsp.TEXT_DOCUMENT_CODE_ACTION,
        lsp.CodeActionOptions([lsp.CodeActionKind.QuickFix, lsp.CodeActionKind.SourceFixAll]),
    )
    async def actions(params: lsp.CodeActionParams) -> list[lsp.CodeAction]:
        uri = params.text_document.uri
        document, state = server.workspace.get_text_document(uri), documents.get(uri)
        if state is None or state.version != document.version:
            return []
        loop, only = asyncio.get_running_loop(), params.context.only
        found: list[lsp.CodeAction] = []
        if only is None or lsp.CodeActionKind.QuickFix in only:
            near = [f for f in state.findings if _overlap(_range(document, f), params.range)]
            found += await loop.run_in_executor(worker, _quick_fixes, server, document, state.findings, near)
        if only is not None and lsp.CodeActionKind.SourceFixAll in only:
            found += await loop.run_in_executor(worker, _fix_everything, server, document)
        return found

    return server


def findings_in(path: str, root: str, text: str) -> list[Finding]:
    """Of the document itself; what it imports below the root is read to understand it."""
    return [finding for finding in report_on(path, root, text).findings if finding.file == path]


def report_on(path: str, root: str, text: str) -> Report:
    config = find_config(path, root)
    if len(text) > LARGEST["python"] or matches_path(path, config.exclude, config.root):
        return Report()
    project = [path, *imported_files(path, root, text)]
    open_config = replace(config, exclude=())
    return BatchCheck(Sources(project, {path: text}, open_config), open_config).check([Found(path, "python", named=True)])


def imported_files(path: str, root: str, text: str) -> list[str]:
    """The files below the root that a document imports, and those that they import."""
    if not root:
        return []
    found: dict[str, None] = {}
    waiting = [(path, text)]
    while waiting and len(found) < MOST_IMPORTS:
        importer, source = waiting.pop()
        for file in _neighbours(importer, root, source):
            if file not in found and file != path:
                found[file] = None
                read = read_text(Found(file, "python"))
                waiting += [(file, read.text)] if isinstance(read, Text) else []
    return list(found)


def _neighbours(importer: str, root: str, source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    folder = os.path.dirname(importer)
    above = [folder]
    while above[-1] != root and above[-1].startswith(os.path.join(root, "")):
        above.append(os.path.dirname(above[-1]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names, tops = [alias.name for alias in node.names], [*above, os.path.join(root, "src")]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)]
            tops = above[node.level - 1 : node.level] if node.level else [*above, os.path.join(root, "src")]
        else:
            continue
        for name in filter(None, names):
            for top in tops:
                stem = os.path.join(top, *name.split("."))
                file = next((f for f in (f"{stem}.py", os.path.join(stem, "__init__.py")) if os.path.isfile(f)), "")
                if file and os.path.realpath(file).startswith(os.path.join(os.path.realpath(root), "")):
                    yield file
                    break


def plain(source: str) -> str:
    return source.replace("\r\n", "\n").replace("\r", "\n")


def page_of(finding: Finding) -> str:
    """The message, and the page of the rule with its examples as code."""
    page = checker_pages().get(finding.code, (finding.severity, ""))[1]
    out, in_code = [f"**{finding.code}**: {finding.message}", ""], False
    for line in page.split("\n"):
        is_code = line.startswith("    ")
        if is_code != in_code and (is_code or line.strip()):
            out.append("```python" if is_code else "```\n")
            in_code = is_code
        out.append(line[4:] if in_code else line)
    return "\n".join([*out, "```"] if in_code else out)


def _place(server: LanguageServer, uri: str) -> tuple[str, str]:
    """The document's path, and the folder of the workspace that it lies in; none for one that is not in a file."""
    path = to_fs_path(uri) or "untitled.py"
    folders = [to_fs_path(folder.uri) or "" for folder in server.workspace.folders.values()]
    roots = [os.path.realpath(f) for f in (*folders, server.workspace.root_path or "") if f]
    real = os.path.realpath(path)
    return real if os.path.isabs(path) else path, max(
        (r for r in roots if real.startswith(os.path.join(r, ""))), key=len, default=""
    )


def _range(document: TextDocument, finding: Finding) -> lsp.Range:
    row, column = (finding.line or 1) - 1, (finding.column or 1) - 1
    end = lsp.Position((finding.end_line or row + 1) - 1, (finding.end_column or column + 2) - 1)
    return document.position_codec.range_to_client_units(document.lines, lsp.Range(lsp.Position(row, column), end))


def _overlap(one: lsp.Range, other: lsp.Range) -> bool:
    return one.start <= other.end and other.start <= one.end


def _diagnostic(document: TextDocument, finding: Finding) -> lsp.Diagnostic:
    return lsp.Diagnostic(
        range=_range(document, finding),
        message=f"{finding.message}\n{finding.hint}" if finding.hint else finding.message,
        severity=SEVERITIES[finding.severity],
        code=finding.code,
        source="nanny",
        tags=[lsp.DiagnosticTag.Deprecated] if finding.code == "REGION_DEPRECATED" else None,
    )


def _quick_fixes(
    server: LanguageServer, document: TextDocument, findings: list[Finding], near: list[Finding]
) -> list[lsp.CodeAction]:
    """One for each finding at the cursor, each checked to do its work."""
    path, root = _place(server, document.uri)
    text = plain(document.source)

    def check(texts: Mapping[str, str]) -> Report:
        return Report(findings_in(path, root, texts[path]))

    out = []
    for finding in near:
        change = next(good_changes(check, path, text, findings, finding), None)
        if change is not None:
            edits = [_text_edit(document, text, edit) for edit in change.edits]
            out.append(
                lsp.CodeAction(
                    title=f"nanny: {change.title}" + ("" if change.is_safe else " (may change numbers elsewhere)"),
                    kind=lsp.CodeActionKind.QuickFix,
                    diagnostics=[_diagnostic(document, finding)],
                    is_preferred=change.is_safe,
                    edit=lsp.WorkspaceEdit({document.uri: edits}),
                )
            )
    return out


def _fix_everything(server: LanguageServer, document: TextDocument) -> list[lsp.CodeAction]:
    """What `--fix` would make of the document."""
    path, root = _place(server, document.uri)
    text = plain(document.source)

    def check(texts: Mapping[str, str]) -> Report:
        return Report(findings_in(path, root, texts.get(path, text)))

    done = fix_all(check, [path], unsafe=False, before={path: text})
    if path not in done.texts:
        return []
    edit = _text_edit(document, text, Edit(0, len(text), done.texts[path]))
    return [
        lsp.CodeAction(
            title="nanny: fix everything that is safe to fix",
            kind=lsp.CodeActionKind.SourceFixAll,
            edit=lsp.WorkspaceEdit({document.uri: [edit]}),
        )
    ]


def _text_edit(document: TextDocument, text: str, edit: Edit) -> lsp.TextEdit:
    def position(offset: int) -> lsp.Position:
        row = text.count("\n", 0, offset)
        return lsp.Position(row, offset - (text.rfind("\n", 0, offset) + 1))

    place = lsp.Range(position(edit.start), position(edit.end))
    ending = "\r\n" if "\r\n" in document.source else "\n"
    return lsp.TextEdit(document.position_codec.range_to_client_units(document.lines, place), edit.text.replace("\n", ending))
