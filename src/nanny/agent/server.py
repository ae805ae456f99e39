"""`nanny mcp`: lets an AI agent check code, read runs, get the diagnosis and the knowledge behind it.

    nanny mcp --root .                    over standard input and output, for a client that starts it
    nanny mcp --root . --http 8765        streamable HTTP on this machine only

It reads below `--root` and writes nothing. With `--allow-run` it also offers diff and trace, which execute the user's code.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, get_type_hints

from ..core.command_line import check_words, command_parser, port, refused_by_the_system
from ..core.finding import NannyError
from ..core.terminal import one_sentence
from .folder import ReadableFolder, real_path
from .prompts import PROMPTS
from .run_tools import RunTools, end_all_groups
from .tools import Tools

TOOLS, RUN_TOOLS = (tuple(name for name in vars(kind) if not name.startswith("_")) for kind in (Tools, RunTools))
INSTRUCTIONS = """nanny says what goes wrong numerically in mixed-precision (FP16/BF16) PyTorch training, where and why.
Before training: check_code. For a recorded run: list_runs, first_anomaly, diagnose, then explain the cause and check_code on
the culprit's file. Rules and causes are also resources (nanny://rule/CODE). NaN and infinities are texts."""


def build_server(folder: ReadableFolder, allow_run: bool = False) -> Any:
    """The server with its tools, prompts and resources; the protocol is imported here and nowhere else."""
    try:
        from mcp.server import MCPServer
        from mcp_types import ToolAnnotations
    except ImportError:
        raise NannyError("the MCP server needs the extra `mcp`; type `pip install 'precision-nanny[mcp]'`") from None
    from .. import __version__

    server = MCPServer("nanny", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")
    looks = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
    tools = Tools(folder)
    for name in TOOLS:
        server.add_tool(_one_sentence(getattr(tools, name)), name=name, annotations=looks)
    if allow_run:
        runs = ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=True)
        running = RunTools(folder)
        for name in RUN_TOOLS:
            server.add_tool(_one_sentence(getattr(running, name)), name=name, annotations=runs)
    for prompt in PROMPTS:
        server.prompt(description=prompt.__doc__)(prompt)
    _add_resources(server, tools)
    return server


def _one_sentence(tool: Callable[..., Any]) -> Callable[..., Any]:
    """What the user or the agent can mend reaches the model; anything else is our bug and keeps its traceback in the log."""
    from mcp.server.mcpserver.exceptions import ToolError

    @contextlib.contextmanager
    def errors_in_words(given: dict[str, Any]) -> Iterator[None]:
        try:
            check_words([value for value in given.values() if isinstance(value, str)])
            yield
        except NannyError as error:
            raise ToolError(one_sentence(str(error))) from None
        except (OSError, MemoryError) as error:
            raise ToolError(one_sentence(refused_by_the_system(error, tool.__name__))) from None

    @functools.wraps(tool)
    def answer(**given: Any) -> Any:
        with errors_in_words(given):
            return tool(**given)

    @functools.wraps(tool)
    async def answer_later(**given: Any) -> Any:
        with errors_in_words(given):
            return await tool(**given)

    if inspect.iscoroutinefunction(tool):
        answer = answer_later
    answer.__signature__ = _described_signature(tool)  # type: ignore[attr-defined]
    return answer


def _described_signature(tool: Callable[..., Any]) -> inspect.Signature:
    """The signature with the words of `Annotated[type, "words"]` as the protocol's descriptions."""
    from pydantic import Field

    hints = get_type_hints(tool, include_extras=True)

    def describe(hint: Any) -> Any:
        words = [m for m in getattr(hint, "__metadata__", ()) if isinstance(m, str)]
        return Annotated[hint.__origin__, Field(description=words[0])] if words else hint

    signature = inspect.signature(tool)
    parameters = [p.replace(annotation=describe(hints[name])) for name, p in signature.parameters.items()]
    return signature.replace(parameters=parameters, return_annotation=hints["return"])


def _add_resources(server: Any, tools: Tools) -> None:
    from ..show.pages import all_names, page_markdown, page_of
    from ..store.schema import schema_page

    for name, title in all_names():
        read = functools.partial(lambda name: page_markdown(page_of(name)), name)
        server.resource(f"nanny://rule/{name}", name=name, description=title, mime_type="text/markdown")(read)

    @server.resource("nanny://schema", name="schema", description="The tables of a store", mime_type="text/markdown")
    def schema() -> str:
        return schema_page()

    @server.resource("nanny://run/{run}/summary", name="summary", description="The verdict on a run", mime_type="text/markdown")
    def summary(run: int) -> str:
        from ..runs.opening import open_job
        from ..runs.summary import summarize
        from ..runs.text.summary import summary_answer
        from ..show.tables import render_answer

        with open_job(tools.folder.store(None), run) as (sources, notes):
            return render_answer(summary_answer(summarize(sources, notes)), "markdown")


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(list(argv))
    root = real_path(options.root)
    if not root.is_dir():
        raise NannyError(f"{options.root}: no such folder; --root names the folder that the agent may read")
    db = None if options.db is None else real_path(options.db)
    if db is not None and not db.exists():
        raise NannyError(f"{options.db}: no such file or folder; --db names a metrics.db or its folder")
    if options.http is not None:
        _say_if_taken(options.http)
    server = build_server(ReadableFolder(root, db), options.allow_run)
    os.chdir(root)
    if options.allow_run:
        signal.signal(signal.SIGTERM, _end_at_once)
    if options.http is None:
        server.run("stdio")
    else:
        print(f"nanny: MCP on http://127.0.0.1:{options.http}/mcp, for this machine only; Ctrl-C ends it", file=sys.stderr)
        server.run("streamable-http", host="127.0.0.1", port=options.http)
    return 0


def _end_at_once(number: int, frame: object) -> None:
    del frame
    end_all_groups()
    os._exit(128 + number)


def _say_if_taken(port: int) -> None:
    """The server itself would tell it with a traceback, after it has greeted."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError as error:
            raise NannyError(f"cannot listen on 127.0.0.1:{port} ({error.strerror or error}); name another --http") from error


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("mcp", __doc__)
    parser.add_argument("--root", default=".", metavar="DIR", help="the folder that the agent may read (default: this one)")
    parser.add_argument("--db", metavar="PATH", help="the store that is meant when a question names none")
    parser.add_argument("--http", type=port, metavar="PORT", help="serve streamable HTTP on 127.0.0.1 instead of stdio")
    parser.add_argument("--allow-run", action="store_true", help="also offer diff and trace, which execute the user's code")
    return parser
