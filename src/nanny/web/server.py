"""The page over HTTP, for one reader on the same machine or behind a tunnel: `nanny ui`. Reads stores, writes nothing.

    /                                   the runs below the folder, or the only one
    /run/PATH/metrics.db/3/             the page on run 3; beside it plotly.js, api/page, api/changes?since=STEP,
                                        api/histogram?kind=KIND&site=NAME, api/whatif
    /api/runs                           the list as JSON; /compare?run=ADDRESS&run=ADDRESS leads to one page on both

Answers GET and HEAD only, to a Host that is this machine (a page on the web that points its own name here gets nothing), with a
token where the address can be reached from elsewhere, and under a content security policy that runs no foreign script.
"""

from __future__ import annotations

import gzip
import hmac
import ipaddress
import re
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

from ..core.finding import NannyError
from ..core.plain_json import to_text
from ..show.html import plotly_source, policy
from ..store.files import last_written
from .data import changes_since, layer_data, page_data, whatif_data
from .page import render
from .runlist import Job, StoredRun, jobs_below, places_of_job, store_at
from .runlist_page import job_object, list_page, message_page

HTML, JSON, SCRIPT = "text/html; charset=utf-8", "application/json", "text/javascript; charset=utf-8"
COMPRESS_FROM = 1000  # bytes
BODIES_KEPT = 8
IDLE_SECONDS = 60.0
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_RUN_ADDRESS = re.compile(
    r"/run/(?P<store>.+)/(?P<run>[0-9]{1,18})/(?P<rest>|runs|plotly\.js|api/(?:page|changes|histogram|whatif))"
)


@dataclass(frozen=True)
class Access:
    """Who may ask."""

    names: frozenset[str]  # what Host may say besides an address in numbers
    token: str = ""  # empty: none needed
    cookie: str = "nanny"
    only_loopback: bool = True


@dataclass(frozen=True)
class Request:
    path: str  # decoded
    query: Mapping[str, str]
    headers: Mapping[str, str]  # names in lower case


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes = b""
    kind: str = HTML
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class ServedRuns:
    """What is served, and what of it need not be worked out again."""

    top: Path
    lang: str | None = None
    jobs: dict[StoredRun, Job] = field(default_factory=dict)
    bodies: dict[tuple[StoredRun, str], tuple[float, bytes]] = field(default_factory=dict)
    jobs_lock: threading.Lock = field(default_factory=threading.Lock)
    bodies_lock: threading.Lock = field(default_factory=threading.Lock)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_is_known(header: str, access: Access) -> bool:
    """False for the names of others: a page on the web can make its own name point to this machine, but not change the name."""
    host = header.strip().lower()
    host = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
    if host.rstrip(".") in access.names:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or not access.only_loopback


def refusal(request: Request, access: Access) -> Reply | None:
    """Why this one gets nothing, or None. The right token in the address gets a cookie, and the address without it."""
    if not host_is_known(request.headers.get("host", ""), access):
        return _plain(421, "This server answers only under its own name; open the address that `nanny ui` has printed.")
    if not access.token:
        return None
    given = request.query.get("token", "")
    if given and hmac.compare_digest(given.encode(), access.token.encode()):
        cookie = f"{access.cookie}={access.token}; Path=/; HttpOnly; SameSite=Strict"
        return Reply(303, headers={"Location": f"/{quote(request.path.lstrip('/'))}", "Set-Cookie": cookie})
    if hmac.compare_digest(_cookie(request, access.cookie).encode(), access.token.encode()):
        return None
    return _plain(403, "This address needs the token that `nanny ui` has printed: add ?token=... to it.")


def answer(request: Request, served: ServedRuns) -> Reply:
    """The reply to a request that is not refused."""
    try:
        if request.path == "/":
            return _front(served, request)
        if request.path == "/compare":
            return _beside(request)
        if request.path == "/api/runs":
            jobs, notes = _jobs(served)
            return _json({"runs": [job_object(job, _address(served.top, job.first.store, job.first.run.id)) for job in jobs],
                          "notes": notes})  # fmt: skip
        found = _RUN_ADDRESS.fullmatch(request.path)
        store = _store(served, found["store"]) if found else None
        if found is None or store is None:
            return _missing(request, "There is nothing under this address; the list of runs is at /.")
        return _of_run(served, request, store, int(found["run"]), found["rest"])
    except NannyError as error:
        return _missing(request, str(error))


def _beside(request: Request) -> Reply:
    """The page on one of the two runs that were ticked, with the other as its reference: the list has the newer one first."""
    ticked = [unquote(one) for one in request.query.get("run", "").split("\n")]
    if len(ticked) != 2 or not all(_RUN_ADDRESS.fullmatch(one) for one in ticked):
        return _html(
            lambda _: message_page("Tick two runs, no more and no less, and compare them.", _preferred_language(request)), 400
        )
    newer, reference = ticked
    return Reply(302, headers={"Location": f"{quote(newer)}?{urlencode({'compare': reference})}"})


def _store(served: ServedRuns, key: str) -> Path | None:
    try:
        return store_at(served.top, key)
    except (OSError, ValueError):  # a name that no file system has
        return None


def _of_run(served: ServedRuns, request: Request, store: Path, run: int, rest: str) -> Reply:
    if rest == "runs":
        return Reply(302, headers={"Location": "/?all"})
    if rest == "plotly.js":
        return Reply(200, _plotly_bytes(), SCRIPT, {"Cache-Control": "private, max-age=86400"})
    places = places_of_job(store, run)
    source = store.parent if len(places) > 1 else store
    of_reference = rest == "api/histogram" and request.query.get("of") == "reference" and "compare" in request.query
    if rest == "api/page" or of_reference:
        compare = request.query.get("compare")
        if compare is not None and not re.fullmatch(r"[0-9]{1,18}", compare):
            other = _RUN_ADDRESS.fullmatch(compare)
            beside = _store(served, other["store"]) if other is not None else None
            if other is None or beside is None:
                return _error(400, "compare takes the number of another run in the same file, or the address of one in another")
            compare = f"{beside}:{other['run']}"
        if of_reference:
            return _json(layer_data(source, run, request.query.get("kind", ""), request.query.get("site", ""), compare))
        page = _from_cache(served, places, f"page {compare}", lambda: page_data(source, run, compare, live=True))
        return Reply(200, page, JSON)
    if rest == "api/changes":
        since = request.query.get("since", "")
        if not re.fullmatch(r"-?[0-9]{1,18}", since):
            return _error(400, "since takes the number of a step")
        return Reply(200, _from_cache(served, places, f"since {since}", lambda: changes_since(source, run, int(since))), JSON)
    if rest == "api/histogram":
        return _json(layer_data(source, run, request.query.get("kind", ""), request.query.get("site", "")))
    if rest == "api/whatif":
        return Reply(200, _from_cache(served, places, "whatif", lambda: whatif_data(source, run)), JSON)
    return _html(lambda nonce: render(None, live=True, lang=served.lang, nonce=nonce))


def _front(served: ServedRuns, request: Request) -> Reply:
    jobs, notes = _jobs(served)
    if len(jobs) == 1 and len(jobs[0].ranks) == 1 and not notes and "all" not in request.query:
        return Reply(302, headers={"Location": _address(served.top, jobs[0].first.store, jobs[0].first.run.id)})
    language = served.lang or _preferred_language(request)
    sort, wanted = request.query.get("sort", ""), request.query.get("q", "")[:200]
    return _html(lambda nonce: list_page(jobs, notes, served.top, partial(_address, served.top), language, nonce, sort, wanted))


def _jobs(served: ServedRuns) -> tuple[list[Job], list[str]]:
    with served.jobs_lock:
        return jobs_below(served.top, served.jobs)


def _from_cache(served: ServedRuns, places: Sequence[StoredRun], what: str, work_out: Callable[[], Any]) -> bytes:
    """JSON that takes a while; worked out again only after one of the stores behind it has been written."""
    key, written = (places[0], what), max(last_written(store) for store, _ in places)
    with served.bodies_lock:
        known = served.bodies.get(key)
        if known is not None and known[0] == written:
            return known[1]
        body = to_text(work_out(), indent=None).encode()
        served.bodies.pop(key, None)
        served.bodies[key] = (written, body)
        while len(served.bodies) > BODIES_KEPT:
            del served.bodies[next(iter(served.bodies))]
        return body


@lru_cache(maxsize=1)
def _plotly_bytes() -> bytes:
    return plotly_source().encode()


@lru_cache(maxsize=1)
def _plotly_gzipped() -> bytes:
    return gzip.compress(_plotly_bytes(), 6)


def _address(top: Path, store: Path, run: int) -> str:
    key = store.name if top.is_file() else store.relative_to(top).as_posix()
    return f"/run/{quote(key)}/{run}/"


def _html(written: Callable[[str], str], status: int = 200) -> Reply:
    nonce = secrets.token_urlsafe(16)
    header = f"{policy(nonce, live=True)}; frame-ancestors 'none'"
    return Reply(status, written(nonce).encode("utf-8", "replace"), HTML, {"Content-Security-Policy": header})


def _json(value: Any) -> Reply:
    return Reply(200, to_text(value, indent=None).encode(), JSON)


def _error(status: int, text: str) -> Reply:
    return Reply(status, to_text({"error": text}, indent=None).encode(), JSON)


def _plain(status: int, text: str) -> Reply:
    return Reply(status, f"{text}\n".encode(), "text/plain; charset=utf-8")


def _missing(request: Request, text: str) -> Reply:
    """For a script as JSON, for a person as a page."""
    return (
        _error(404, text) if "/api/" in request.path else _html(lambda _: message_page(text, _preferred_language(request)), 404)
    )


def _cookie(request: Request, name: str) -> str:
    try:
        found = SimpleCookie(request.headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return found.value if found else ""


def _preferred_language(request: Request) -> str:
    return "zh" if request.headers.get("accept-language", "").lower().startswith("zh") else "en"


class Connection(BaseHTTPRequestHandler):
    """Reads the requests of one reader and writes replies; what they say is decided above."""

    protocol_version = "HTTP/1.1"
    server_version = "nanny"
    sys_version = ""
    timeout = IDLE_SECONDS
    server: Server

    def do_GET(self) -> None:
        try:
            parts = urlsplit(self.path)
        except ValueError:  # a bracket that is not closed
            return self.send_error(400)
        if len(self.headers.get_all("Host") or ()) > 1:
            return self.send_error(400)
        given = parse_qs(parts.query, keep_blank_values=True)
        query = {name: "\n".join(values) if name == "run" else values[-1] for name, values in given.items()}
        request = Request(unquote(parts.path), query, {name.lower(): value for name, value in self.headers.items()})
        return self._send(refusal(request, self.server.access) or answer(request, self.server.served))

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server refuses before it asks us, in our words: another method, or no HTTP that it knows."""
        del message, explain
        self.close_connection = True  # a body is not read
        if code == 501:
            return self._send(Reply(405, b"Only GET and HEAD are answered.\n", "text/plain", {"Allow": "GET, HEAD"}))
        words = {414: "The address is too long.", 431: "The headers are too long."}
        status = code if code < 500 else 400
        return self._send(_plain(status, words.get(code, "This is no request that can be understood; open / in a browser.")))

    def _send(self, reply: Reply) -> None:
        headers = {"Cache-Control": "no-store", **HEADERS, **reply.headers, "Content-Type": reply.kind}
        body = reply.body
        if len(body) >= COMPRESS_FROM and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = _plotly_gzipped() if reply.kind == SCRIPT else gzip.compress(body, 5)
            headers["Content-Encoding"] = "gzip"
        try:
            self.send_response(reply.status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        except ConnectionError:
            self.close_connection = True  # the reader has closed the page

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: requests come every second."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # a page asks for several things at once, and so do its readers

    def __init__(self, host: str, port: int, served: ServedRuns, token: str = "") -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.served = served
        super().__init__((host, port), Connection)
        names = frozenset({"localhost"} if is_loopback(host) else {"localhost", host.lower(), *_own_names()})
        self.access = Access(names, token, f"nanny_{self.port}", is_loopback(host))

    def server_bind(self) -> None:
        """Without http.server's question to the name service, which can take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader who goes away in the middle is no error; anything else is ours, and keeps its traceback."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    @property
    def port(self) -> int:
        return int(self.server_address[1])


def _own_names() -> set[str]:
    return {socket.gethostname().lower(), socket.getfqdn().lower()}
