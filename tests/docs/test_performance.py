"""The page of what it costs, as the benchmarks write it."""

from __future__ import annotations

import importlib
from pathlib import Path


def test_a_table_replaces_the_one_before_and_nothing_else(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    bench, timing = importlib.import_module("benchmarks.__main__"), importlib.import_module("benchmarks.timing")
    page = bench.PAGE.read_text(encoding="utf-8")
    lines = [timing.Line("theirs", 1.5, "times", None, 1.0, True), timing.Line("ours", 0.25, "ms", 0.5, 0.98, False)]
    once = bench.written(page, "python -m benchmarks --write monitor", timing.table(lines))
    assert "| ours | 0.25 ms | 0.5 | 0.50 | 0.98 |\n| theirs | 1.5 times |  |  | 1.00 |" in once
    assert "`python -m benchmarks --write monitor`, 2" in once
    again = bench.written(once, "python -m benchmarks --write", timing.table(lines[:1]))
    assert "ours |" not in again
    places = list(bench.PLACE.finditer(page))
    assert [found[2] for found in places] == ["table", "peers"]
    assert again.split("<!-- table:")[0] == page.split("<!-- table:")[0]
    assert again.split("<!-- end of the table -->", 1)[1] == page.split("<!-- end of the table -->", 1)[1]


def test_a_peer_has_seen_what_it_says_of_the_failure_alone(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    peers = importlib.import_module("benchmarks.peers")
    assert len(peers.FAILURES) == 12  # as docs/performance.md says
    assert {"unscaled_attention", "empty_row"} < set(peers.FAILURES)
    assert not {"deepspeed_engine", "ddp", "compiled"} & set(peers.FAILURES)  # what a peer may lack, or cannot be attached to
    quiet = {f"{name}{mended}": "" for name in peers.FAILURES for mended in ("", " --fixed")}
    first, second = peers.FAILURES[:2]
    answers = {**quiet, first: "loss is NaN", second: "crashed", f"{second} --fixed": "crashed"}
    column = peers.cells("naive hooks", answers)
    assert column[first] == "loss is NaN"
    assert (column["seen"], column["false alarms on the mended ones"]) == (
        f"1 of {len(peers.FAILURES)}",
        f"1 of {len(peers.FAILURES)}",
    )
    absent = peers.Peer("no_such_package", peers.naive_hooks)
    monkeypatch.setitem(peers.PEERS, "somebody", absent)
    assert "somebody" in peers.table({"nanny": column})[-1]
