"""Odd requests to `nanny ui` over a real socket: 4xx in one sentence or an answer, nothing on stderr, and it goes on."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from runs.query_recordings import HEALTHY, record

from nanny.web.server import ServedRuns, Server

from .files import ODD_TEXT, spoil_bytes

QUICK, THOROUGH = 150, 3000
PATHS = (
    *("/", "/api/runs", "/run/metrics.db/1/", "/run/metrics.db/1/api/page", "/run/metrics.db/1/api/changes?since=1"),
    *("/run/metrics.db/1/api/histogram?kind=grad&site=stem.weight", "/run/metrics.db/1/api/whatif", "/run/metrics.db/1/runs"),
)
ODD_PATHS = (
    *(
        "/../../etc/passwd",
        "/run/../../../etc/passwd/1/",
        "/run/%2e%2e/%2e%2e/etc/passwd/1/",
        "/run/..%2fmetrics.db/1/",
        "//evil.example/",
    ),
    *(
        "/run/metrics.db/99999999999999999999999/api/page",
        "/run/metrics.db/0/",
        "/run/metrics.db/-1/",
        "/run/metrics.db/٣/api/page",
    ),
    *(
        "/run/metrics.db%00/1/",
        "/run/%ff%fe/1/",
        "/run//1/",
        "/run/metrics.db/1/api/changes?since=" + "9" * 5000,
        "http://[::1/",
        "*",
    ),
    *(
        "/run/metrics.db/1/api/page?compare=" + "9" * 5000,
        "/run/metrics.db/1/api/page?compare=7",
        "/run/metrics.db/" + "9" * 5000 + "/",
    ),
    *(
        "/run/metrics.db/1/api/page?compare=%D9%A3",
        "/run/metrics.db/1/api/histogram?kind=%00&site=%ED%A0%80",
        "/?" + "a=1&" * 5000,
    ),
    *(
        "/run/metrics.db/1/api/histogram",
        "/run/metrics.db/1/api/histogram?kind=grad&site=" + "x" * 5000,
        "/run/" + "x/" * 500 + "1/",
    ),
    *(
        "/run/" + "x" * 300 + "/metrics.db/1/",
        "/run/metrics.db/1/api/changes?since=-999999999999999999",
        "/run/metrics.db/1/%0d%0aX:1",
    ),
)
METHODS = ("GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "TRACE", "CONNECT", "PATCH", "get", "BREW", "", "\x16\x03\x01")


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    record(folder, HEALTHY)
    with Server("127.0.0.1", 0, ServedRuns(folder)) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield serving
        serving.shutdown()


def send(server: Server, request: bytes, seconds: float = 30.0) -> bytes:
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=seconds)) as line:
        try:
            line.sendall(request)
            line.shutdown(socket.SHUT_WR)
            pieces = []
            while piece := line.recv(65536):
                pieces.append(piece)
        except TimeoutError:
            raise
        except OSError:  # it has answered and closed before all was said
            return b""
        return b"".join(pieces)


def status_of(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1]) if reply.startswith(b"HTTP/") else 0


def draw_request(rng: Random) -> bytes:
    method = rng.choice(METHODS) if rng.random() < 0.3 else "GET"
    path = rng.choice(ODD_PATHS) if rng.random() < 0.6 else rng.choice(PATHS)
    if rng.random() < 0.2:
        path += rng.choice(ODD_TEXT)[:70_000]
    host = rng.choice((*ODD_TEXT[:40], "evil.example", "[::1", "127.0.0.1:99999999")) if rng.random() < 0.2 else "127.0.0.1"
    lines = [f"{method} {path} HTTP/{rng.choice(('1.1', '1.1', '1.0', '9.9', '0.9', 'x', '2'))}", f"Host: {host}"]
    if rng.random() < 0.3:
        lines.append(
            f"{rng.choice(('Cookie', 'Accept-Language', 'Content-Length', 'Transfer-Encoding', 'X', ''))}: {rng.choice(ODD_TEXT)}"
        )
    if rng.random() < 0.05:
        lines += ["X: 1"] * 200
    request = "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass") + (b"x" * 1000 if method != "GET" else b"")
    return spoil_bytes(request, rng) if rng.random() < 0.2 else request


def ask_many(server: Server, seed: int, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(count):
        request = draw_request(Random(f"{seed} {number}"))
        reply = send(server, request)
        assert status_of(reply) < 500, (number, request[:300], reply[:300])
        assert b"Traceback" not in reply
    sys.stderr.flush()
    assert capsys.readouterr().err == ""
    assert status_of(send(server, b"GET /api/runs HTTP/1.0\r\nHost: localhost\r\n\r\n")) == 200


def test_some_odd_requests(server, capsys):
    ask_many(server, 1, QUICK, capsys)


@pytest.mark.slow
def test_many_odd_requests(server, capsys):
    ask_many(server, 2, THOROUGH, capsys)


@pytest.mark.parametrize("path", ODD_PATHS)
def test_an_odd_address_is_refused_with_4xx_or_leads_nowhere_else(server, path):
    reply = send(server, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert 200 <= status_of(reply) < 500, reply[:200]
    assert b"root:" not in reply


@pytest.mark.parametrize("method", ["POST", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "BREW"])
def test_only_get_and_head_are_answered(server, method):
    reply = send(server, f"{method} / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc".encode())
    assert status_of(reply) == 405
    assert b"Allow: GET, HEAD" in reply


def test_head_has_no_body(server):
    reply = send(server, b"HEAD /api/runs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert status_of(reply) == 200
    assert reply.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[", "localhost:1:2", "\x1b[31m", "x" * 5000])
def test_another_name_gets_nothing(server, host):
    assert status_of(send(server, f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())) in (400, 421, 431)


def test_two_names_at_once_get_nothing(server):
    assert status_of(send(server, b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")) in (400, 421)
    assert status_of(send(server, b"GET / HTTP/1.1\r\nHost: evil.example\r\nHost: localhost\r\n\r\n")) in (400, 421)


def test_overlong_lines_are_refused(server):
    assert status_of(send(server, b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n")) == 414
    assert status_of(send(server, b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n")) == 431
    assert status_of(send(server, b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 300 + b"\r\n")) == 431


def test_half_open_connections_and_fifty_at_once_leave_it_answering(server, capsys):
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(60)]
    for number, line in enumerate(idle):
        line.sendall((b"", b"GET ", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: loc")[number % 4])
    replies: list[int] = []
    ask = b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    crowd = [threading.Thread(target=lambda: replies.append(status_of(send(server, ask)))) for _ in range(50)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join(60)
    assert replies == [200] * 50
    for line in idle:
        line.close()
    gone = socket.create_connection(("127.0.0.1", server.port))
    gone.sendall(ask * 50)
    gone.close()
    assert status_of(send(server, ask)) == 200
    assert capsys.readouterr().err == ""


def test_a_file_of_the_folder_that_is_no_store_is_not_served(server):
    (Path(server.served.top) / "secret.txt").write_text("secret")
    for path in ("/run/secret.txt/1/", "/secret.txt", "/run/metrics.db/../secret.txt/1/"):
        reply = send(server, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert status_of(reply) == 404
