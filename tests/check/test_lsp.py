"""`nanny lsp` as an editor uses it: a real client over standard input and output."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from lsprotocol import types as lsp
from pygls.lsp.client import LanguageClient

CLIP = """\
import torch

# 缩放的梯度 😀
def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        "😀"; torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""


class Editor:
    """An editor with one workspace: documents are opened and changed, and what the server says about them is awaited."""

    def __init__(self, root: Path):
        self.root = root
        self.client = LanguageClient("editor", "1")
        self.said: asyncio.Queue[lsp.PublishDiagnosticsParams] = asyncio.Queue()

        @self.client.feature(lsp.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
        def said(params: lsp.PublishDiagnosticsParams) -> None:
            self.said.put_nowait(params)

    async def __aenter__(self) -> Editor:
        await self.client.start_io(sys.executable, "-m", "nanny", "lsp", "--stdio")
        folder = lsp.WorkspaceFolder(self.root.as_uri(), "project")
        started = await self.client.initialize_async(
            lsp.InitializeParams(lsp.ClientCapabilities(), root_uri=self.root.as_uri(), workspace_folders=[folder])
        )
        assert started.capabilities.hover_provider
        self.client.initialized(lsp.InitializedParams())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.shutdown_async(None)
        self.client.exit(None)
        await self.client.stop()

    def uri(self, name: str) -> str:
        return (self.root / name).as_uri()

    async def diagnostics(self) -> lsp.PublishDiagnosticsParams:
        return await asyncio.wait_for(self.said.get(), 60)

    async def open(self, name: str, text: str) -> list[lsp.Diagnostic]:
        item = lsp.TextDocumentItem(self.uri(name), lsp.LanguageKind.Python, 1, text)
        self.client.text_document_did_open(lsp.DidOpenTextDocumentParams(item))
        return list((await self.diagnostics()).diagnostics)

    async def change(self, name: str, text: str, version: int) -> None:
        whole = lsp.TextDocumentContentChangeWholeDocument(text)
        document = lsp.VersionedTextDocumentIdentifier(version, self.uri(name))
        self.client.text_document_did_change(lsp.DidChangeTextDocumentParams(document, [whole]))

    async def actions(self, name: str, place: lsp.Range, only: list[lsp.CodeActionKind] | None = None) -> list[lsp.CodeAction]:
        document = lsp.TextDocumentIdentifier(self.uri(name))
        context = lsp.CodeActionContext([], only=only)
        return list(await self.client.text_document_code_action_async(lsp.CodeActionParams(document, place, context)) or [])


def applied(text: str, edits: list[lsp.TextEdit]) -> str:
    """What an editor makes of the text; positions count UTF-16 units."""
    lines = [line.encode("utf-16-le") for line in text.splitlines(keepends=True)]
    starts = [sum(map(len, lines[:i])) for i in range(len(lines) + 1)]
    data = b"".join(lines)
    for edit in sorted(edits, key=lambda e: (e.range.start.line, e.range.start.character), reverse=True):
        start, end = (starts[p.line] + 2 * p.character for p in (edit.range.start, edit.range.end))
        data = data[:start] + edit.new_text.encode("utf-16-le") + data[end:]
    return data.decode("utf-16-le")


def test_what_is_shown_in_an_editor_is_what_the_command_finds(tmp_path):
    from nanny.check.language_server import findings_in, page_of

    (finding,) = findings_in(str(tmp_path / "train.py"), str(tmp_path), CLIP)
    assert (finding.code, finding.line) == ("SCALER_CLIP_BEFORE_UNSCALE", 10)
    page = page_of(finding)
    assert "```python\nscaler.scale(loss).backward()\n" in page
    assert page.count("```") % 2 == 0


@pytest.mark.slow
def test_a_finding_is_shown_explained_and_fixed(tmp_path):
    async def session() -> None:
        async with Editor(tmp_path) as editor:
            (found,) = await editor.open("train.py", CLIP)
            assert (found.code, found.severity, found.source) == (
                "SCALER_CLIP_BEFORE_UNSCALE", lsp.DiagnosticSeverity.Error, "nanny",
            )  # fmt: skip
            assert (found.range.start.line, found.range.start.character) == (9, 14), "an emoji is two UTF-16 units"
            document = lsp.TextDocumentIdentifier(editor.uri("train.py"))
            hover = await editor.client.text_document_hover_async(lsp.HoverParams(document, lsp.Position(9, 20)))
            assert "```python\nscaler.scale(loss).backward()" in hover.contents.value
            assert await editor.client.text_document_hover_async(lsp.HoverParams(document, lsp.Position(0, 0))) is None
            (action,) = await editor.actions("train.py", found.range)
            assert (action.kind, action.is_preferred) == (lsp.CodeActionKind.QuickFix, True)
            new = applied(CLIP, list(action.edit.changes[document.uri]))
            assert '        "😀"; scaler.unscale_(optimizer); torch.nn.utils.clip_grad_norm_' in new
            everything = await editor.actions("train.py", found.range, [lsp.CodeActionKind.SourceFixAll])
            assert applied(CLIP, list(everything[0].edit.changes[document.uri])) == new
            await editor.change("train.py", "import", 2)
            await editor.change("train.py", new, 3)
            after = await editor.diagnostics()
            assert (after.version, list(after.diagnostics)) == (3, []), "one answer for what was typed in one go"
        assert list(tmp_path.iterdir()) == []

    asyncio.run(session())


@pytest.mark.slow
def test_what_is_imported_below_the_root_is_understood_and_nothing_above_it_is_read(tmp_path):
    root = tmp_path / "project"
    (root / "app").mkdir(parents=True)
    helper = "def unscale(scaler, optimizer):\n    {}\n"
    (root / "app" / "steps.py").write_text(helper.format("scaler.unscale_(optimizer)"))
    (tmp_path / "outside.py").write_text(helper.format("pass"))
    (root / "pyproject.toml").write_text('[tool.nanny]\nignore = ["REGION"]\n')
    text = "from app import steps\n" + CLIP.replace('"😀"; ', "steps.unscale(scaler, optimizer); ")

    async def session() -> None:
        async with Editor(root) as editor:
            assert await editor.open("train.py", text) == [], "the helper unscales"
            (root / "app" / "steps.py").write_text(helper.format("pass"))
            await editor.change("train.py", text + "\n", 2)
            assert [d.code for d in (await editor.diagnostics()).diagnostics] == ["SCALER_CLIP_BEFORE_UNSCALE"]
            above = text.replace("from app import steps", "import outside as steps")
            assert await editor.open("above.py", above) == [], "a helper that nobody may look into might unscale"
            assert [d.code for d in await editor.open("broken.py", "def f(:\n")] == ["SYNTAX_ERROR"]
            old = "import torch\nwith torch.cuda.amp.autocast():\n    pass\n"
            assert await editor.open("old.py", old) == [], "pyproject.toml is obeyed"

    asyncio.run(session())
