"""`nanny mcp --allow-run`: what a call started ends with it and sees no secrets; a crowd of calls leaves the server answering."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, MCPError, StdioServerParameters

from nanny.agent.folder import ReadableFolder
from nanny.agent.server import build_server

PYTHON = sys.executable
BAD_CODE = "import torch\nscaler = torch.amp.GradScaler('cuda')\nscaler.step(optimizer)\nx = torch.ones(3).half().log()\n"
SLEEPER = """import os, subprocess, time
child = subprocess.Popen(["sleep", "600"])
with open("pids.part", "w") as out:
    out.write(f"{os.getpid()} {child.pid}")
os.rename("pids.part", "pids")
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Any, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A program in the interpreter's place, so that a call starts in no time; `program(text)` says what it does."""

    def program(text: str) -> Path:
        (tmp_path / "train.py").write_text("pass\n")
        script = tmp_path / "interpreter"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return tmp_path.resolve()

    return program


def call_in_process(root: Path, arguments: dict[str, Any]) -> Any:
    async def go() -> Any:
        async with Client(build_server(ReadableFolder(root), allow_run=True)) as client:
            return await client.call_tool("trace", arguments)

    return anyio.run(go)


LEAVES_A_CHILD = "sleep 600 &\necho $$ $! > pids.part; mv pids.part pids\n"


def test_a_cancelled_call_ends_the_script_and_its_children(stand_in):
    root = stand_in(LEAVES_A_CHILD + "wait")

    async def go() -> None:
        async with Client(build_server(ReadableFolder(root), allow_run=True)) as client, anyio.create_task_group() as group:
            group.start_soon(client.call_tool, "trace", {"script": "train.py"})
            while not (root / "pids").exists():
                await anyio.sleep(0.02)
            group.cancel_scope.cancel()

    anyio.run(go)
    pids = list(map(int, (root / "pids").read_text().split()))
    assert wait_for(lambda: not any(map(is_alive, pids)), 10)


def test_a_call_that_takes_too_long_is_ended_with_its_children(stand_in):
    root = stand_in(LEAVES_A_CHILD + "wait")
    result = call_in_process(root, {"script": "train.py", "timeout": 0.5})
    assert "stopped after 0.5 s" in result.content[0].text
    assert wait_for(lambda: not any(map(is_alive, map(int, (root / "pids").read_text().split()))), 10)


def test_a_script_that_ends_leaves_no_child_behind(stand_in):
    root = stand_in(LEAVES_A_CHILD + "echo done")
    result = call_in_process(root, {"script": "train.py"})
    assert result.structured_content["output"] == "done\n"
    assert wait_for(lambda: not any(map(is_alive, map(int, (root / "pids").read_text().split()))), 10)


def test_the_program_sees_a_short_list_of_the_environment(stand_in, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("HF_TOKEN", "hidden")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("LC_TIME", "C")
    seen = call_in_process(stand_in("env"), {"script": "train.py"}).structured_content["output"]
    assert "hidden" not in seen
    assert {"CUDA_VISIBLE_DEVICES=1", "LC_TIME=C"} <= set(seen.splitlines())


def test_an_endless_output_is_cut_while_it_is_read(stand_in):
    result = call_in_process(stand_in("yes y | head -c 3000000; echo end"), {"script": "train.py"}).structured_content
    assert len(result["output"]) < 50_000
    assert result["output"].endswith("end\n")
    assert "cut in the middle" in result["notes"][1]


@pytest.mark.parametrize("timeout", [0, -1, 1e9, float("nan"), float("inf")])
def test_an_odd_timeout_is_refused(stand_in, timeout):
    result = call_in_process(stand_in("true"), {"script": "train.py", "timeout": timeout})
    assert result.is_error
    assert "Traceback" not in result.content[0].text


def test_settings_above_the_root_are_not_read(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.nanny]\nselect = ["NO_SUCH_RULE"]\n')
    root = tmp_path / "root"
    root.mkdir()
    (root / "train.py").write_text(BAD_CODE)
    (tmp_path / "elsewhere.toml").write_text('[tool.nanny]\nexclude = ["train.py"]\n')

    def ask(path: str) -> Any:
        async def go() -> Any:
            async with Client(build_server(ReadableFolder(root.resolve()))) as client:
                return await client.call_tool("check_code", {"path": path})

        return anyio.run(go)

    for path in ("train.py", "."):
        assert ask(path).structured_content["total"] > 0
    (root / "pyproject.toml").symlink_to(tmp_path / "elsewhere.toml")
    from nanny.check.config import forget_configs

    forget_configs()
    assert ask(".").structured_content["total"] > 0


def test_a_pipe_named_like_a_script_is_skipped_with_the_reason(tmp_path):
    os.mkfifo(tmp_path / "x.py")
    (tmp_path / "big.py").write_bytes(b"#" * (3 << 20))

    async def go() -> Any:
        async with Client(build_server(ReadableFolder(tmp_path.resolve()))) as client:
            with anyio.fail_after(30):
                return [await client.call_tool("check_code", {"path": path}) for path in ("x.py", "big.py", ".")]

    pipe, big, folder = (result.structured_content["notes"] for result in anyio.run(go))
    assert "a pipe; only regular files are read" in pipe[0]
    assert "3.0 MB is more than the 2 MB that are read" in big[0]
    assert folder


ODD_ARGUMENTS = [
    ("check_code", {"path": "\ud800"}),
    ("check_code", {"path": "x" * 5000}),
    ("check_code", {"text": "x = '\ud800'"}),
    ("check_code", {"text": "(" * 100_000}),
    ("check_code", {"path": ".", "offset": -1}),
    ("explain", {"name": "\x1b[31m" * 1000}),
    ("run_summary", {"run": 10**30}),
    ("run_summary", {"run": -1}),
    ("run_summary", {"db": "\x00"}),
    ("findings", {"steps": "9" * 6000}),
    ("findings", {"steps": "99999999999999999999"}),
    ("findings", {"layer": "[" * 2000}),
    ("compare_runs", {"run_a": 10**30, "run_b": 1}),
    ("what_if", {"dtype": "fp16", "scale": float("nan")}),
    ("nosuchtool", {}),
    ("list_runs", {"nosuch": 1}),
    ("layer_history", {"layer": {"a": 1}}),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    from runs.query_recordings import HEALTHY, record

    root = tmp_path_factory.mktemp("recorded").resolve()
    record(root / "nanny_logs", HEALTHY)
    return root


def test_odd_arguments_are_answered_with_a_tool_error_and_no_traceback_is_logged(recorded, caplog):
    async def go() -> None:
        async with Client(build_server(ReadableFolder(recorded))) as client:
            for tool, arguments in ODD_ARGUMENTS:
                try:
                    result = await client.call_tool(tool, arguments)
                except (MCPError, UnicodeEncodeError):  # no such tool, or what no JSON can carry
                    continue
                text = result.content[0].text
                assert "Traceback" not in text
                assert len(text) < 50_000
                assert "\x1b" not in text
            assert not (await client.call_tool("list_runs", {})).is_error

    anyio.run(go)
    assert [record for record in caplog.records if record.exc_info] == []


def stdio(root: Path, *flags: str) -> StdioServerParameters:
    env = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    words = ["-m", "nanny.cli", "mcp", "--root", str(root), *flags]
    return StdioServerParameters(command=sys.executable, args=words, cwd=root, env=env)


@pytest.mark.slow
def test_fifty_calls_at_once_of_which_most_are_cancelled_leave_the_server_answering(recorded):
    async def go() -> None:
        finished = []

        async def call(client: Client, number: int, scope: anyio.CancelScope) -> None:
            with scope:
                text = "import torch\n" + "x = torch.ones(3).half()\n" * 200
                finished.append(await client.call_tool("check_code", {"text": text, "limit": 1}))

        async with Client(stdio(recorded)) as client:
            scopes = [anyio.CancelScope() for _ in range(50)]
            async with anyio.create_task_group() as group:
                for number, scope in enumerate(scopes):
                    group.start_soon(call, client, number, scope)
                await anyio.sleep(0.05)
                for scope in scopes[5:]:
                    scope.cancel()
            assert len(finished) >= 5
            with anyio.fail_after(30):
                assert (await client.call_tool("list_runs", {})).structured_content["total"] == 1

    anyio.run(go)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["cancel", "close", "terminate"])
def test_a_real_script_ends_with_its_call_and_with_the_server(tmp_path, ending):
    root = tmp_path.resolve()
    (root / "train.py").write_text(SLEEPER)

    async def go() -> None:
        async with Client(stdio(root, "--allow-run")) as client, anyio.create_task_group() as group:

            async def call() -> None:
                try:
                    await client.call_tool("trace", {"script": "train.py"})
                except Exception:  # noqa: BLE001 - the server was ended
                    assert ending == "terminate"

            group.start_soon(call)
            while not (root / "pids").exists():
                await anyio.sleep(0.05)
            if ending == "terminate":
                script = int((root / "pids").read_text().split()[0])
                parent = int(Path(f"/proc/{script}/stat").read_text().rpartition(")")[2].split()[1])
                os.kill(parent, signal.SIGTERM)
            if ending == "cancel":
                group.cancel_scope.cancel()
                await anyio.sleep(0)
            if ending == "close":
                raise KeyError("the client goes")

    with contextlib.suppress(BaseException) if ending in ("close", "terminate") else contextlib.nullcontext():
        anyio.run(go)
    pids = list(map(int, (root / "pids").read_text().split()))
    assert wait_for(lambda: not any(map(is_alive, pids)), 20)


@pytest.mark.slow
def test_standard_input_that_ends_ends_the_script(stand_in):
    root = stand_in(LEAVES_A_CHILD + "wait")
    code = (
        "import sys; sys.executable = sys.argv[1]\n"
        "from nanny import cli; sys.exit(cli.main(['mcp', '--root', sys.argv[2], '--allow-run']))"
    )
    messages = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
            "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "trace", "arguments": {"script": "train.py"}}},
    ]  # fmt: skip
    with subprocess.Popen(
        [PYTHON, "-c", code, sys.executable, str(root)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as server:
        assert server.stdin is not None
        server.stdin.write("".join(json.dumps(m) + "\n" for m in messages).encode())
        server.stdin.flush()
        assert wait_for((root / "pids").exists)
        server.stdin.close()
        assert server.wait(30) is not None
    assert wait_for(lambda: not any(map(is_alive, map(int, (root / "pids").read_text().split()))), 10)
