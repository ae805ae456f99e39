"""`nanny ui`: a real server on recorded runs; who may ask, and what they get."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import broken_numbers, violations, watched_page
from runs.query_recordings import CULPRIT, HEALTHY, SICK, nanny, record

from nanny.cli import main
from nanny.core.finding import Finding, Severity
from nanny.core.step import RunInfo
from nanny.store.writer import RunWriter
from nanny.web.server import Access, ServedRuns, Server, host_is_known
from nanny.web.ui import greeting

HOSTILE = "</script><img src=x onerror=alert(1)>\"'"


@dataclass(frozen=True)
class Client:
    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            reply = connection.getresponse()
            return reply, reply.read()
        finally:
            connection.close()

    def json(self, path: str) -> dict:
        reply, body = self.ask(path)
        assert reply.status == 200, body
        return json.loads(body)


@contextlib.contextmanager
def serving(top: Path, token: str = "", lang: str | None = None, host: str = "127.0.0.1") -> Iterator[Client]:
    server = Server(host, 0, ServedRuns(top, lang), token)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield Client(server.port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Tags(HTMLParser):
    """Elements and attributes, as a browser would see them."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(body.decode())

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def links(self) -> list[str]:
        return [attributes["href"] or "" for tag, attributes in self.seen if tag == "a"]


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """A folder of experiments: two runs in one file, a job of three ranks, and one with a hostile name."""
    top = tmp_path_factory.mktemp("experiments")
    record(top / "one", replace(SICK, started=1000.0))
    record(top / "one", replace(HEALTHY, started=2000.0))
    for rank in range(3):
        record(top / "ddp", replace(SICK if rank == 2 else HEALTHY, rank=rank, world_size=3, started=3000.0 + rank))
    record(top / HOSTILE.replace("/", "|"), replace(HEALTHY, started=4000.0, layers={HOSTILE: (0, -8), "层" * 5000: (0, -8)}))
    return top


# What is shown


def test_the_front_page_lists_every_job_newest_first_with_its_verdict(many):
    with serving(many) as client:
        runs = client.json("/api/runs")["runs"]
        assert [(Path(run["file"]).parent.name, run["run"]) for run in runs[1:]] == [("ddp", 1), ("one", 2), ("one", 1)]
        assert [run["healthy"] for run in runs] == [True, False, True, False]
        reply, body = client.ask("/")
        assert reply.status == 200
        page = Tags(body)
        assert page.text.count("NOT HEALTHY") == 2
        assert page.text.count(CULPRIT.site) == 2
        assert {run["address"] for run in runs} <= set(page.links())


def test_the_list_is_sorted_and_filtered_and_draws_the_loss(many):
    with serving(many) as client:
        rows = client.ask("/?all&sort=verdict")[1].decode().split("<tr>")[2:]
        assert ["NOT HEALTHY" in row for row in rows] == [True, True, False, False]
        found = Tags(client.ask("/?all&q=ddp")[1])
        assert found.text.count("NOT HEALTHY") == 1
        assert any(block in found.text for block in "▁▂▃▄▅▆▇█")
        assert "No run has" in Tags(client.ask("/?all&q=nowhere")[1]).text


def test_a_long_reason_ends_with_its_line_and_not_inside_a_number(tmp_path):
    message = "step 32: sum gives 101,599 in FP32, beyond 65,504 of fp16: 95.3 % of its 64 results become infinite; " * 2
    found = (Finding("OVERFLOW", Severity.ERROR, message, site="head", step=20),)
    record(tmp_path, replace(SICK, findings=found))
    with serving(tmp_path) as client:
        assert b"-<wbr>" not in client.ask("/?all")[1], "an option stays whole"
        assert message.strip() in Tags(client.ask("/?all")[1]).text.replace("\xa0", " ")


def test_the_ranks_of_a_job_are_one_entry_whose_verdict_counts_them_all(many):
    with serving(many) as client:
        (job,) = [run for run in client.json("/api/runs")["runs"] if len(run["ranks"]) > 1]
        assert [(rank["rank"], rank["errors"]) for rank in job["ranks"]] == [(0, 0), (1, 0), (2, 2)]
        assert job["culprit"]["rank"] == 2
        page = client.json(f"{job['address']}api/page")
        assert page["verdict"]["healthy"] is False
        assert any(link.endswith("metrics.rank2.db/1/") for link in Tags(client.ask("/")[1]).links())


def test_a_single_run_is_shown_at_once_and_the_list_on_demand(tmp_path):
    store = record(tmp_path, HEALTHY)
    for top in (tmp_path, store):
        with serving(top) as client:
            reply, _ = client.ask("/")
            assert (reply.status, reply.headers["Location"]) == (302, "/run/metrics.db/1/")
            reply, _ = client.ask("/run/metrics.db/1/runs")
            assert (reply.status, reply.headers["Location"]) == (302, "/?all")
            assert "HEALTHY" in Tags(client.ask("/?all")[1]).text


def test_an_empty_folder_says_what_to_do_and_shows_the_run_when_it_comes(tmp_path):
    with serving(tmp_path) as client:
        assert "nanny run train.py" in Tags(client.ask("/")[1]).text
        record(tmp_path, HEALTHY)
        assert client.ask("/")[0].status == 302


def test_a_damaged_file_is_named_and_the_others_are_shown(many, tmp_path):
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    record(tmp_path / "good", HEALTHY)
    (tmp_path / "bad" / "metrics.db").write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with serving(tmp_path) as client:
        answer = client.json("/api/runs")
        assert len(answer["runs"]) == 1
        assert "bad" in answer["notes"][0]
        assert "bad/metrics.db" in Tags(client.ask("/")[1]).text


def test_the_verdict_of_a_running_run_is_not_cached(tmp_path):
    with serving(tmp_path) as client:
        writer = RunWriter(tmp_path, RunInfo(started=1.0, argv=("train.py",)))
        writer.add_scalars(0, {"loss": 1.0})
        writer.flush()
        assert client.json("/api/runs")["runs"][0]["healthy"] is True
        writer.add_finding(replace(CULPRIT, step=1))
        writer.flush()
        assert client.json("/api/runs")["runs"][0]["healthy"] is False
        writer.close("finished")
        assert client.json("/api/runs")["runs"][0]["status"] == "finished"


def test_a_growing_run_is_told_in_small_changes(tmp_path):
    writer = RunWriter(tmp_path, RunInfo(started=1.0, argv=("train.py",)))
    for step in range(5):
        writer.add_scalars(step, {"loss": 1.0})
    writer.flush()
    with serving(tmp_path) as client:
        first = client.json("/run/metrics.db/1/api/page")
        assert first["steps"] == {"first": 0, "last": 4}
        for step in range(5, 9):
            writer.add_scalars(step, {"loss": 0.5})
        writer.flush()
        _, body = client.ask("/run/metrics.db/1/api/changes?since=4")
        change = json.loads(body)
        assert change["steps"]["last"] == 8
        assert change["curves"]["loss"]["steps"]["shape"] == [4]
        assert len(body) < 100_000
        assert client.json("/run/metrics.db/1/api/page")["steps"]["last"] == 8  # nothing stale is kept
    writer.close("finished")


def test_two_runs_of_one_file_can_be_compared(many):
    with serving(many) as client:
        page = client.json("/run/one/metrics.db/2/api/page?compare=1")
        assert page["comparison"]["other"]["id"] == 1
        assert page["kinds"]["output"]["quantities"]["ratio"]["codes"]["shape"][0] == len(page["kinds"]["output"]["names"])
        layer = "/run/one/metrics.db/2/api/histogram?compare=1&kind=output&site=head"
        own, beside = client.json(layer), client.json(f"{layer}.out&of=reference")  # SICK has a layer that HEALTHY has not
        assert own["shares"]
        assert beside["shares"]
        assert client.json(f"{layer}.out") is None
        boxes = [at["value"] for tag, at in Tags(client.ask("/")[1]).seen if tag == "input" and at.get("type") == "checkbox"]
        assert {"/run/one/metrics.db/1/", "/run/one/metrics.db/2/", "/run/ddp/metrics.db/1/"} <= set(boxes)
        reply, _ = client.ask("/compare?run=/run/one/metrics.db/2/&run=/run/ddp/metrics.db/1/")
        assert reply.status == 302
        address, _, query = reply.headers["Location"].partition("?")
        assert address == "/run/one/metrics.db/2/"
        assert "ddp" in client.json(f"{address}api/page?{query}")["comparison"]["other"]["file"]
        reply, body = client.ask("/compare?run=/run/one/metrics.db/2/", Accept_Language="zh-CN")
        assert (reply.status, "勾选" in body.decode()) == (400, True)
        assert client.ask("/run/one/metrics.db/2/api/page?compare=/run/../../etc/passwd/1/")[0].status == 400
        assert client.ask("/run/one/metrics.db/2/api/page?compare=/etc/passwd")[0].status == 400


NOWHERE = ("/run/one/metrics.db/99/api/page", "/run/nowhere/metrics.db/1/", "/other", "/run/../../etc/passwd/1/",
           "/run/%2e%2e/%2e%2e/etc/passwd/1/", "/run/one/metrics.db/1/api/other", "/api/")  # fmt: skip
STRANGERS = ("evil.example", "evil.example:8765", "localhost.evil.example", "127.0.0.1.nip.io", "", "192.168.1.5", "[::2]")


@pytest.mark.parametrize("path", NOWHERE)
def test_an_unknown_address_is_not_found(many, path):
    with serving(many) as client:
        reply, body = client.ask(path)
        assert reply.status == 404
        assert b"root:" not in body


def test_a_link_out_of_the_folder_is_not_followed(many, tmp_path):
    record(tmp_path / "secret", HEALTHY)
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "door").symlink_to(tmp_path / "secret")
    with serving(tmp_path / "shown") as client:
        assert client.json("/api/runs")["runs"] == []
        assert client.ask("/run/door/metrics.db/1/api/page")[0].status == 404


def test_steps_that_are_no_numbers_are_refused(many):
    with serving(many) as client:
        for since in ("", "x", "1e3", "9" * 40):
            assert client.ask(f"/run/one/metrics.db/1/api/changes?since={since}")[0].status == 400


def test_bodies_are_compressed_for_who_takes_it(many):
    with serving(many) as client:
        plain, body = client.ask("/run/one/metrics.db/1/plotly.js")
        small, packed = client.ask("/run/one/metrics.db/1/plotly.js", Accept_Encoding="gzip")
        assert "Content-Encoding" not in plain.headers
        assert small.headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(packed) == body
        assert len(packed) < len(body) / 2


# Who may ask


@pytest.mark.parametrize("host", STRANGERS)
def test_a_host_that_is_not_this_machine_gets_nothing(many, host):
    with serving(many) as client:
        reply, body = client.ask("/api/runs", Host=host)
        assert reply.status == 421
        assert b"metrics" not in body


@pytest.mark.parametrize("host", ["localhost", "localhost:1234", "127.0.0.1:8765", "LOCALHOST.", "[::1]:80", "127.0.0.2"])
def test_a_tunnel_from_any_local_port_is_let_in(many, host):
    with serving(many) as client:
        assert client.ask("/api/runs", Host=host)[0].status == 200


def test_an_open_address_is_known_by_its_numbers_and_own_name_only():
    access = Access(frozenset({"localhost", "trainer"}), "secret", only_loopback=False)
    assert all(host_is_known(host, access) for host in ("10.0.0.3:8765", "trainer:8765", "[fe80::1]:8765"))
    assert not any(host_is_known(host, access) for host in ("evil.example", "trainer.evil.example:8765", ""))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get_and_head_are_answered(many, method):
    with serving(many) as client:
        reply, _ = client.ask("/", method)
        assert (reply.status, reply.headers["Allow"]) == (405, "GET, HEAD")
        head, body = client.ask("/api/runs", "HEAD")
        assert (head.status, body) == (200, b"")


def test_a_token_is_asked_for_and_becomes_a_cookie(many):
    with serving(many, token="s3cret") as client:
        for path, headers in (("/", {}), ("/api/runs?token=wrong", {}), ("/api/runs", {"Cookie": f"nanny_{client.port}=wrong"}),
                              ("/api/runs?token=", {}), ("/api/runs", {"Cookie": "s3cret"})):  # fmt: skip
            reply, body = client.ask(path, **headers)
            assert (reply.status, b"metrics" in body) == (403, False), path
        reply, _ = client.ask("/run/one/metrics.db/1/?token=s3cret")
        assert (reply.status, reply.headers["Location"]) == (303, "/run/one/metrics.db/1/")
        cookie = reply.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert client.ask("/api/runs", Cookie=cookie.partition(";")[0])[0].status == 200


def test_pages_forbid_foreign_scripts_frames_and_requests(many):
    with serving(many) as client:
        for path in ("/", "/run/one/metrics.db/1/"):
            reply, body = client.ask(path)
            rules = dict(part.strip().partition(" ")[::2] for part in reply.headers["Content-Security-Policy"].split(";"))
            assert rules["default-src"] == "'none'"
            assert "unsafe" not in rules["script-src"]
            assert rules["connect-src"] == "'self'"
            assert rules["frame-ancestors"] == "'none'"
            assert reply.headers["X-Content-Type-Options"] == "nosniff"
            nonces = re.findall(r"'nonce-([^']+)'", rules["script-src"])
            scripts = [attributes for tag, attributes in Tags(body).seen if tag == "script"]
            assert all(attributes.get("nonce") in nonces for attributes in scripts)
        first, second = (client.ask("/")[0].headers["Content-Security-Policy"] for _ in range(2))
        assert first != second


def test_hostile_names_stay_text(many):
    with serving(many) as client:
        body = client.ask("/")[1]
        page = Tags(body)
        assert not [tag for tag, _ in page.seen if tag in ("img", "script")]
        assert "onerror" in page.text
        (address,) = [run["address"] for run in client.json("/api/runs")["runs"] if "onerror" in run["file"]]
        assert HOSTILE in client.json(f"{address}api/page")["kinds"]["output"]["names"]


# The command


def test_the_command_serves_says_how_to_reach_it_and_ends_with_ctrl_c(tmp_path):
    record(tmp_path, HEALTHY)
    command = [sys.executable, "-m", "nanny.cli", "ui", "--db", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        port = re.search(r"http://127\.0\.0\.1:(\d+)/", lines[0])
        assert port is not None, lines
        assert f"ssh -N -L {port[1]}:127.0.0.1:{port[1]} " in lines[1]
        reply, _ = Client(int(port[1])).ask("/run/metrics.db/1/api/page")
        assert reply.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0


def test_an_address_beyond_this_machine_comes_with_a_token(tmp_path):
    server = Server("127.0.0.1", 0, ServedRuns(tmp_path), "")
    server.server_close()
    assert not any("token" in line for line in greeting(server, tmp_path))
    server = Server("0.0.0.0", 0, ServedRuns(tmp_path), "abc")
    server.server_close()
    lines = greeting(server, tmp_path)
    assert lines[0].endswith(f":{server.port}/?token=abc")
    assert "unencrypted" in lines[1]


def test_a_taken_port_is_one_sentence(tmp_path, capsys):
    record(tmp_path, HEALTHY)
    with serving(tmp_path) as client:
        assert main(["ui", "--db", str(tmp_path), "--port", str(client.port)]) == 2
    assert capsys.readouterr().err.endswith("name another --port\n")


@pytest.mark.parametrize(("argv", "said"), [(["--db", "nowhere"], "no such file or folder"), ([], "no runs here")])
def test_a_missing_folder_is_one_sentence(tmp_path, monkeypatch, capsys, argv, said):
    monkeypatch.chdir(tmp_path)
    assert main(["ui", *argv]) == 2
    assert said in capsys.readouterr().err


# In a browser


@pytest.mark.slow
def test_the_list_leads_to_the_page_of_a_run_and_back(many, chromium):
    with serving(many) as client, watched_page(chromium, own_server=client.address) as watched:
        watched.page.goto(client.address)
        watched.page.click("a[href='/run/one/metrics.db/1/']")
        page = watched.drawn()
        assert CULPRIT.site in page.inner_text("#verdict")
        page.click("header a")
        page.locator("tbody tr").nth(3).wait_for()
        assert page.locator("tbody tr").count() == 4
        assert "4" not in page.title()


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1024, 1440])
def test_no_word_is_broken_in_the_list(width, tmp_path, chromium):
    for name in ("underflow/nanny_logs", "experiments/second_try/nanny_logs"):
        record(tmp_path / name, replace(SICK, started=1000.0))
    example = Path(__file__).parents[2] / "examples" / "lost_digits.py"
    assert nanny("run", example, cwd=tmp_path).returncode == 0
    size = {"width": width, "height": 900}
    with serving(tmp_path) as client, watched_page(chromium, own_server=client.address, viewport=size) as watched:
        watched.page.goto(client.address)
        broken = watched.page.evaluate(
            r"""() => { const walk = document.createTreeWalker(document.querySelector("table"), NodeFilter.SHOW_TEXT), out = [];
              while (walk.nextNode()) for (const found of walk.currentNode.data.matchAll(/\w+?(?=[_\W]|$)/g)) {
                const range = document.createRange();
                range.setStart(walk.currentNode, found.index);
                range.setEnd(walk.currentNode, found.index + found[0].length);
                if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) out.push(found[0]);
              }
              return out; }"""
        )
        assert broken == []
        text = watched.page.locator("table").inner_text()
        assert "catastrophic_cancellation" in text
        assert "second_try" in text
        assert "/nanny_logs" not in text, "every run lies in one of that name"
        assert watched.page.evaluate("() => document.documentElement.scrollWidth") <= width


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1440])
def test_a_list_that_waits_shows_what_comes_and_takes_no_tick_away(width, tmp_path, chromium):
    record(tmp_path / "first", replace(SICK, started=1000.0))
    writer = RunWriter(tmp_path / "second", RunInfo(started=9e9, argv=("train.py",)))
    writer.add_scalars(0, {"loss": 1.0})
    writer.flush()
    size = {"width": width, "height": 900}
    with serving(tmp_path) as client, watched_page(chromium, own_server=client.address, viewport=size) as watched:
        page = watched.page
        page.clock.install()
        page.goto(client.address)
        assert violations(page) == [], "a page that loads itself anew takes the reader's place away"
        writer.add_scalars(7, {"loss": 1.0})
        writer.flush()
        page.locator("input[name=run]").first.check()
        page.clock.run_for(25_000)
        assert page.locator("input[name=run]").first.is_checked()
        page.locator("input[name=run]").first.uncheck()
        page.locator("h1").click()
        page.clock.run_for(25_000)
        page.locator("td[data-head='last step']", has_text="7").wait_for()
        assert broken_numbers(page) == []
    writer.close("finished")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_the_list_nor_beside_another_run(scheme, many, chromium):
    with serving(many) as client, watched_page(chromium, own_server=client.address, color_scheme=scheme) as watched:
        watched.page.goto(client.address)
        assert violations(watched.page) == []
        watched.page.goto(f"{client.address}/run/one/metrics.db/2/?compare=1")
        assert violations(watched.drawn()) == []


@pytest.mark.slow
def test_hostile_names_are_harmless_in_the_live_page(many, chromium):
    with serving(many) as client, watched_page(chromium, own_server=client.address) as watched:
        (address,) = [run["address"] for run in client.json("/api/runs")["runs"] if "onerror" in run["file"]]
        watched.page.goto(client.address + address)
        page = watched.drawn()
        assert page.locator("img[src=x]").count() == 0


@pytest.mark.slow
def test_a_run_that_grows_on_disk_grows_on_the_page(tmp_path, chromium):
    writer = RunWriter(tmp_path, RunInfo(started=9e9, argv=("train.py",)))
    for step in range(10):
        writer.add_scalars(step, {"loss": 2.0})
    writer.flush()
    with serving(tmp_path) as client, watched_page(chromium, own_server=client.address) as watched:
        watched.page.goto(client.address)
        page = watched.drawn()
        assert "HEALTHY" in page.inner_text("#verdict h1")
        assert "NOT HEALTHY" not in page.inner_text("#verdict h1")
        page.locator("#live .dot").wait_for()
        page.evaluate("() => { document.body.style.minHeight = '4000px'; scrollTo(0, 900); }")
        for step in range(10, 25):
            writer.add_scalars(step, {"loss": 1.0})
        writer.add_finding(replace(CULPRIT, step=20, site="stem"))
        writer.flush()
        page.locator("#toast", has_text="NOT HEALTHY").wait_for()  # whoever has scrolled away is told, in the tab too
        assert "NOT HEALTHY" in page.title()
        assert "c8451b" in page.locator("#icon").get_attribute("href")
        page.locator("#verdict h1", has_text="NOT HEALTHY").wait_for()
        page.locator("#verdict", has_text="0 … 24").wait_for()
        assert page.locator("aside#findings li").count() == 1
    writer.close("finished")


@pytest.mark.slow
def test_two_ticked_runs_are_compared_with_curves_histograms_and_a_map_of_ratios(many, chromium):
    with serving(many) as client, watched_page(chromium, own_server=client.address) as watched:
        page = watched.page
        page.goto(client.address)
        boxes = page.locator("input[name=run][value^='/run/one/']")
        assert boxes.count() == 2
        for box in boxes.all():
            box.check()
        page.locator("button[type=submit]", has_text="compare").click()
        watched.drawn()
        assert page.locator("#comparison h2").inner_text().startswith("Beside run")
        assert page.evaluate("() => Object.keys(page.otherCurves).includes('loss')")
        assert page.evaluate("() => heat.quantity") == "ratio"
        page.wait_for_function("() => shown?.beside?.x.length > 0")


@pytest.mark.slow
def test_of_a_job_every_rank_has_its_strip_and_the_first_is_named(many, chromium):
    with serving(many) as client, watched_page(chromium, own_server=client.address) as watched:
        (address,) = [run["address"] for run in client.json("/api/runs")["runs"] if "ddp" in run["file"]]
        watched.page.goto(client.address + address)
        page = watched.drawn()
        rows = page.locator("#ranks .rank").all_inner_texts()
        assert [row.split("\n")[0] for row in rows] == ["rank 0", "rank 1", "rank 2 ◆ the first"]
        assert [page.locator("#ranks .rank").nth(rank).locator(".mark").count() > 0 for rank in range(3)] == [False, False, True]
        assert "rank 2" in page.locator("#finding-list li").first.inner_text()
        page.locator("#ranks .mark").first.click()
        assert page.evaluate("() => state.step") == 10
        page.locator("#ranks a", has_text="rank 1").click()
        page.wait_for_url("**/run/ddp/metrics.rank1.db/1/*")
