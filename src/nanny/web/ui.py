"""`nanny ui`: the page on a run in the browser, live while training goes on.

For instance:

    nanny ui                         the newest runs under nanny_logs
    nanny ui --db experiments        all runs below a folder, with their verdicts
"""

from __future__ import annotations

import argparse
import getpass
import secrets
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from ..core.command_line import add_language, command_parser, port
from ..core.finding import NannyError
from ..core.terminal import say
from ..show.html import check_language
from ..store.files import DEFAULT_FOLDER, find_stores
from .server import ServedRuns, Server, is_loopback

PORT = 8765
PORTS_TRIED = 20


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    top = _served_path(args.db)
    served = ServedRuns(top, check_language(args.lang))
    token = secrets.token_urlsafe(24) if args.token or not is_loopback(args.host) else ""
    server = _open_server(args.host, args.port, served, token)
    with server:
        for line in greeting(server, top):
            say(line)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("nanny: closed", file=sys.stderr)
    return 0


def greeting(server: Server, top: Path) -> list[str]:
    """What to open, and what to type on the machine where the browser is."""
    host = str(server.server_address[0])
    tail = f"?token={quote(server.access.token)}" if server.access.token else ""
    if is_loopback(host):
        shown = f"[{host}]" if ":" in host else host
        there = f"{_user()}@{socket.gethostname()}"
        tunnel = f"ssh -N -L {server.port}:{shown}:{server.port} {shlex.quote(there)}"
        return [
            f"{top} is shown at http://{shown}:{server.port}/{tail}",
            f"From another machine, type there: {tunnel}",
            f"and open http://localhost:{server.port}/{tail}",
            "Ctrl-C ends it.",
        ]
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return [
        f"{top} is shown at http://{f'[{name}]' if ':' in name else name}:{server.port}/{tail}",
        "Whoever has the token can read it, and it travels unencrypted; without --host, an ssh tunnel needs neither.",
        "Ctrl-C ends it.",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("ui", "The page on a run in the browser, live while it trains.")
    parser.add_argument("--db", metavar="PATH", help="a metrics.db, or a folder with any number of runs (default: nanny_logs)")
    parser.add_argument(
        "--port",
        type=lambda text: 0 if text == "0" else port(text),
        metavar="N",
        help=f"default: {PORT}, or the next that is free; 0 for any",
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1; any other needs a token")
    parser.add_argument("--token", action="store_true", help="ask for a token on this machine too: others may be logged in")
    add_language(parser, "the page")
    return parser


def _served_path(db: str | None) -> Path:
    """The file, or the folder; it may be empty yet, if it was named."""
    if db is None:
        find_stores(None)  # says what to type where there is nothing
        return Path(DEFAULT_FOLDER)
    path = Path(db)
    if not path.exists():
        raise NannyError(f"{path}: no such file or folder; name a metrics.db or its folder with --db PATH")
    return path


def _open_server(host: str, number: int | None, served: ServedRuns, token: str) -> Server:
    tried = [number] if number is not None else [*range(PORT, PORT + PORTS_TRIED), 0]
    for attempt in tried:
        try:
            return Server(host, attempt, served, token)
        except (OSError, TypeError, UnicodeError) as error:  # no text for the name service, or none of its names
            if not isinstance(error, OSError):
                raise NannyError(f"{host!r} is no name of a machine; name an address with --host") from error
            if attempt == tried[-1] or isinstance(error, socket.gaierror):
                advice = "name another --port" if number is not None else "name another --host"
                raise NannyError(f"cannot listen on {host}:{attempt} ({error.strerror or error}); {advice}") from error
    raise AssertionError("the last port either serves or raises")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "USER"
