"""`nanny mcp` asked by the official client: over stdio in both protocol modes, and in process where only the answer matters."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from mcp import Client, MCPError, StdioServerParameters
from runs.query_recordings import HEALTHY, Recipe, record

from nanny import cli
from nanny.agent.folder import ReadableFolder
from nanny.agent.server import RUN_TOOLS, TOOLS, build_server
from nanny.agent.tools import MOST_ROWS
from nanny.core.finding import Finding, Severity

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BAD_CODE = """import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
for x in data:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""
CLIP_LINE = 1 + BAD_CODE.splitlines().index("    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)")
LAYERS = {"embed": (0.0, -10.0), "blocks.0.attn": (2.0, -12.0), "head": (1.0, -9.0)}
BROKEN = Finding("NAN", Severity.ERROR, "NaN out of finite inputs", "look at its inputs", "blocks.0.attn", 20, value=float("nan"))
WARNED = Finding("HEADROOM_LOW", Severity.WARNING, "1.5 bits of headroom", "", "blocks.0.attn", 10, value=1.5, limit=2.0)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("project").resolve()
    (root / "train.py").write_text(BAD_CODE)
    record(root / "nanny_logs", Recipe(LAYERS, started=1.7e9))
    bad = {"loss_is_nan_from": 20, "nan_output": (20, "blocks.0.attn"), "findings": (WARNED, BROKEN)}
    record(root / "nanny_logs", Recipe(LAYERS, amp_dtype="fp16", started=1.8e9, **bad))
    return root


def stdio(root: Path, *flags: str) -> StdioServerParameters:
    return StdioServerParameters(command=sys.executable, args=["-m", "nanny.cli", "mcp", "--root", str(root), *flags], cwd=root)


def talk(server: Any, work: Callable[[Client], Awaitable[Any]], mode: str = "auto") -> Any:
    async def session() -> Any:
        async with Client(server, mode=mode) as client:
            return await work(client)

    return anyio.run(session)


def ask(project: Path, tool: str, **arguments: Any) -> dict[str, Any]:
    """A tool's answer as the client gets it, its text and its structure saying the same."""
    result = talk(build_server(ReadableFolder(project)), lambda client: client.call_tool(tool, arguments))
    assert not result.is_error, result.content[0].text
    assert json.loads(result.content[0].text) == result.structured_content
    return dict(result.structured_content)


def refused(project: Path, tool: str, folder: ReadableFolder | None = None, **arguments: Any) -> str:
    """The one sentence that reaches the model."""
    result = talk(build_server(folder or ReadableFolder(project)), lambda client: client.call_tool(tool, arguments))
    assert result.is_error
    text = result.content[0].text
    assert "Traceback" not in text
    return str(text)


# the protocol


@pytest.mark.parametrize("mode", ["auto", pytest.param("legacy", marks=pytest.mark.slow)])
def test_a_client_over_stdio_reaches_every_tool_prompt_and_resource(project, mode):
    async def walk(client: Client) -> None:
        listed = (await client.list_tools()).tools
        assert tuple(tool.name for tool in listed) == TOOLS
        assert len(TOOLS) <= 10
        for tool in listed:
            assert tool.annotations.read_only_hint
            assert tool.output_schema["type"] == "object"
            assert all("description" in p for p in tool.input_schema["properties"].values()), tool.name
        calls = {
            "check_code": {"path": "train.py"},
            "explain": {"name": "NAN"},
            "list_runs": {},
            "run_summary": {"run": 2},
            "findings": {"severity": "warning"},
            "first_anomaly": {},
            "layer_history": {"layer": "blocks.0.attn"},
            "compare_runs": {"run_a": 1, "run_b": 2},
            "diagnose": {},
            "what_if": {"dtype": "bf16", "run": 1},
        }
        assert set(calls) == set(TOOLS)
        for name, arguments in calls.items():
            result = await client.call_tool(name, arguments)
            assert not result.is_error, (name, result.content)
            assert result.structured_content
        prompts = (await client.list_prompts()).prompts
        assert len(prompts) == 3
        for prompt in prompts:
            text = (await client.get_prompt(prompt.name, {})).messages[0].content.text
            assert "check_code" in text
        resources = (await client.list_resources()).resources
        page = await client.read_resource(str(next(r.uri for r in resources if r.name == "NAN")))
        assert "NAN" in page.contents[0].text
        assert "CREATE TABLE run" in (await client.read_resource("nanny://schema")).contents[0].text
        assert "NOT HEALTHY" in (await client.read_resource("nanny://run/2/summary")).contents[0].text

    talk(stdio(project), walk, mode)


def test_every_rule_and_cause_is_a_resource(project):
    from nanny.show.pages import all_names

    resources = talk(build_server(ReadableFolder(project)), lambda client: client.list_resources()).resources
    assert {r.name for r in resources} >= {name for name, _ in all_names()}


@pytest.mark.landing
def test_starting_and_asking_about_runs_does_not_import_torch(project):
    code = (
        "import sys, anyio; from pathlib import Path; from mcp import Client; from nanny.agent.server import build_server;"
        "from nanny.agent.folder import ReadableFolder\n"
        "async def go():\n"
        f"    async with Client(build_server(ReadableFolder(Path({str(project)!r})))) as client:\n"
        "        for name in ('list_runs', 'run_summary', 'first_anomaly', 'diagnose'):\n"
        "            assert not (await client.call_tool(name, {})).is_error, name\n"
        "anyio.run(go); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"


@pytest.mark.landing
def test_standard_output_carries_the_protocol_alone(project):
    request = {"jsonrpc": "2.0", "id": 1, "method": "initialize"}
    request["params"] = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}
    done = subprocess.run(
        [sys.executable, "-m", "nanny.cli", "mcp", "--root", str(project)],
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = done.stdout.splitlines()
    assert [json.loads(line)["id"] for line in lines] == [1]


@pytest.mark.landing
def test_a_server_killed_in_a_call_is_an_error_for_the_client_and_harms_no_run(project):
    store = project / "nanny_logs" / "metrics.db"
    before = store.read_bytes()

    async def kill_it(client: Client) -> None:
        pids = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True).stdout.split()
        servers = [int(p) for p in pids if b"\0mcp\0" in Path(f"/proc/{p}/cmdline").read_bytes()]
        assert servers
        threading.Timer(0.2, lambda: [os.kill(pid, signal.SIGKILL) for pid in servers]).start()
        with pytest.raises(MCPError):
            await client.call_tool("check_code", {"text": "import torch\n" + "x = torch.ones(3).half()\n" * 30_000})

    talk(stdio(project), kill_it)
    assert store.read_bytes() == before


@pytest.mark.slow
def test_it_answers_over_http_on_this_machine_only(project):
    with subprocess.Popen(
        [sys.executable, "-m", "nanny.cli", "mcp", "--root", str(project), "--http", "8791"], stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert "http://127.0.0.1:8791/mcp" in server.stderr.readline()

            async def when_up() -> Any:
                for _ in range(200):
                    try:
                        await (await anyio.connect_tcp("127.0.0.1", 8791)).aclose()
                        break
                    except OSError:
                        await anyio.sleep(0.1)
                async with Client("http://127.0.0.1:8791/mcp") as client:
                    return await client.call_tool("list_runs", {})

            assert anyio.run(when_up).structured_content["total"] == 2
        finally:
            server.send_signal(signal.SIGINT)


# the answers


def test_code_is_checked_by_path_and_by_text(project):
    for given in ({"path": "train.py"}, {"text": BAD_CODE}):
        found = ask(project, "check_code", **given)
        lines = {(f["line"], f["severity"]) for f in found["findings"]}
        assert (CLIP_LINE, "error") in lines or (CLIP_LINE, "warning") in lines
        assert all(not f["file"].startswith("/") for f in found["findings"])


def test_runs_come_newest_first_with_their_counts(project):
    rows = ask(project, "list_runs")["runs"]
    assert [(row["run"], row["errors"], row["dtype"]) for row in rows] == [(2, 1, "fp16"), (1, 0, "-")]
    assert {row["db"] for row in rows} == {"nanny_logs/metrics.db"}


def test_a_place_that_list_runs_gives_is_taken_by_every_other_tool(project):
    row = ask(project, "list_runs")["runs"][0]
    assert ask(project, "run_summary", db=row["db"], run=row["run"])["culprit"]["site"] == "blocks.0.attn"


def test_the_first_anomaly_names_step_layer_and_what_warned_before(project):
    anomaly = ask(project, "first_anomaly")
    assert (anomaly["first"]["step"], anomaly["first"]["site"]) == (20, "blocks.0.attn")
    assert anomaly["first"]["value"] == "NaN"
    assert [w["code"] for w in anomaly["warned_before"]] == ["HEADROOM_LOW"]
    assert anomaly["loss_not_finite_from"] == 20


def test_a_healthy_run_has_no_anomaly(project):
    anomaly = ask(project, "first_anomaly", run=1)
    assert (anomaly["healthy"], anomaly["first"]) == (True, None)
    assert ask(project, "diagnose", run=1)["diagnoses"] == []


def test_long_answers_come_in_pages(project):
    first = ask(project, "layer_history", layer="head", limit=3)
    second = ask(project, "layer_history", layer="head", limit=3, offset=first["next_offset"])
    for a, b in zip(first["kinds"], second["kinds"]):
        assert len(a["steps"]) <= 3
        assert not set(a["steps"]) & set(b["steps"])
    page = ask(project, "findings", limit=1)
    assert (page["total"], len(page["findings"]), page["next_offset"]) == (2, 1, 1)
    assert ask(project, "findings", limit=1, offset=1)["next_offset"] is None


def test_two_runs_part_where_the_second_breaks(project):
    answer = ask(project, "compare_runs", run_a=1, run_b=2)
    assert answer["parts"]
    assert "step 20" in answer["verdict"]


def test_a_run_that_is_being_written_can_be_read(project, tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from nanny.store.writer import RunWriter\n"
        "from nanny.core.step import RunInfo\n"
        "w = RunWriter(Path(sys.argv[1]), RunInfo(started=1.9e9, amp_dtype='bf16'))\n"
        "for i in range(10**6): w.add_scalars(i, {'loss': 1.0}); time.sleep(0.002); i == 500 and print('on', flush=True)\n"
    )
    folder = tmp_path / "nanny_logs"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE) as trainer:
        try:
            assert trainer.stdout.readline()
            summary = ask(tmp_path.resolve(), "run_summary")
            assert summary["status"] == "running"
            assert summary["last_step"] > 0
        finally:
            trainer.kill()


# bad input


@pytest.mark.parametrize("path", ["../x.py", "/etc/passwd", "a/../../x", "link.py", "linked/secret.py", "loop", "nul\0byte"])
def test_no_path_leads_outside_the_root(tmp_path, path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.py").write_text(BAD_CODE)
    (tmp_path / "x.py").write_text(BAD_CODE)
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "link.py").symlink_to(outside / "secret.py")
    (root / "linked").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    assert "clip_grad" not in refused(root.resolve(), "check_code", path=path)


def test_a_folder_is_checked_without_the_links_that_lead_out(tmp_path):
    (tmp_path / "secret.py").write_text(BAD_CODE)
    root = tmp_path / "root"
    root.mkdir()
    (root / "link.py").symlink_to(tmp_path / "secret.py")
    (root / "own.py").write_text("import torch\n")
    found = ask(root.resolve(), "check_code", path=".")
    assert (found["total"], found["files_checked"]) == (0, 1)
    assert "leads outside" in found["notes"][0]


def test_stores_outside_the_root_are_not_read(project, tmp_path):
    root = tmp_path / "root"
    (root / "nanny_logs").mkdir(parents=True)
    (root / "nanny_logs" / "metrics.db").symlink_to(project / "nanny_logs" / "metrics.db")
    assert "outside" in refused(root.resolve(), "run_summary")
    assert "outside" in refused(root.resolve(), "run_summary", db=str(project / "nanny_logs"))
    assert ask(root.resolve(), "list_runs")["total"] == 0


def test_links_that_lead_to_themselves_are_no_store_and_no_source(tmp_path):
    (tmp_path / "nanny_logs").mkdir()
    for name in ("nanny_logs/metrics.db", "loop.py"):
        (tmp_path / name).symlink_to(tmp_path / name)
    (tmp_path / "own.py").write_text("import torch\n")
    assert ask(tmp_path.resolve(), "list_runs")["total"] == 0
    assert ask(tmp_path.resolve(), "check_code", path=".")["files_checked"] == 1
    assert "no such file" in refused(tmp_path.resolve(), "run_summary", db="nanny_logs/metrics.db")
    assert cli.main(["mcp", "--root", str(tmp_path), "--db", str(tmp_path / "nanny_logs" / "metrics.db")]) == 2


def test_the_store_named_at_the_start_may_lie_elsewhere(project, tmp_path):
    folder = ReadableFolder(tmp_path.resolve(), project / "nanny_logs")
    result = talk(build_server(folder), lambda client: client.call_tool("run_summary", {}))
    assert result.structured_content["run"] == 2


@pytest.mark.quick(7)
@pytest.mark.parametrize(
    ("tool", "arguments", "says"),
    [
        ("check_code", {}, "either path or text"),
        ("check_code", {"path": "nosuch.py"}, "no such file"),
        ("check_code", {"path": "train.py", "limit": 0}, f"1 to {MOST_ROWS}"),
        ("check_code", {"path": "train.py", "device": "tpu"}, "device"),
        ("explain", {"name": "NANN"}, "did you mean 'NAN'"),
        ("run_summary", {"run": 99}, "99"),
        ("run_summary", {"db": "train.py"}, "train.py"),
        ("findings", {"steps": "later"}, "range of steps"),
        ("findings", {"severity": "fatal"}, "severity"),
        ("layer_history", {"layer": "nosuchlayer"}, "no layer"),
        ("layer_history", {"layer": "--help"}, "no layer"),
        ("compare_runs", {"run_a": 1, "run_b": 77}, "77"),
        ("what_if", {"dtype": "int8"}, "fp8_e4m3"),
        ("what_if", {"dtype": "fp16", "scale": 3.0}, "power of two"),
    ],
)
def test_bad_arguments_reach_the_model_as_one_useful_sentence(project, tool, arguments, says):
    text = refused(project, tool, **arguments)
    assert says in text


def test_a_port_that_is_none_or_taken_is_one_sentence(project, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["mcp", "--root", str(project), "--http", port]) == 2
    assert "name another --http" in capsys.readouterr().err
    assert cli.main(["mcp", "--root", str(project), "--http", "99999"]) == 2
    assert "is no port" in capsys.readouterr().err


def test_a_format_that_does_not_exist_is_answered_with_those_that_do(project):
    told = refused(project, "what_if", dtype="fp8")
    assert "fp8_e4m3" in told
    assert "fp8_e5m2" in told


def test_a_run_without_steps_is_not_sent_to_diagnosis(tmp_path):
    record(tmp_path, replace(HEALTHY, steps=0))
    assert "no step on record" in ask(tmp_path, "run_summary", db=".")["next"]


def test_an_empty_folder_says_how_to_record_a_run(tmp_path):
    assert "nanny run" in refused(tmp_path.resolve(), "run_summary")
    assert ask(tmp_path.resolve(), "list_runs")["total"] == 0


# running code


def test_code_is_executed_only_if_the_server_was_told_so(project):
    names = [tool.name for tool in talk(build_server(ReadableFolder(project)), lambda client: client.list_tools()).tools]
    assert not set(RUN_TOOLS) & set(names)
    allowed = talk(build_server(ReadableFolder(project), allow_run=True), lambda client: client.list_tools()).tools
    running = {tool.name: tool for tool in allowed if tool.name in RUN_TOOLS}
    assert set(running) == set(RUN_TOOLS)
    for tool in running.values():
        assert "EXECUTES" in tool.description
        assert not tool.annotations.read_only_hint


@pytest.mark.landing
def test_diff_runs_the_users_model_in_a_process_of_its_own(tmp_path):
    import torch

    (tmp_path / "model.py").write_text("import torch\n\ndef model():\n    return torch.nn.Linear(4, 2)\n")
    torch.save(torch.ones(3, 4), tmp_path / "sample.pt")
    server = build_server(ReadableFolder(tmp_path.resolve()), allow_run=True)
    result = talk(server, lambda client: client.call_tool("diff", {"model": "model.py:model", "input": "sample.pt"}))
    assert not result.is_error, result.content
    assert result.structured_content["exit_code"] == 0
    assert json.loads(result.structured_content["output"])


# what is documented

REPOSITORY = Path(__file__).parents[2]
_BLOCK = re.compile(r"```(json|toml)\n(.*?)```", re.DOTALL)


def documented_commands(page: str) -> list[list[str]]:
    """The command lines that the clients' settings in a page would start."""
    found = []
    for language, text in _BLOCK.findall((REPOSITORY / page).read_text(encoding="utf-8")):
        settings = json.loads(text) if language == "json" else tomllib.loads(text)
        servers = settings.get("mcpServers") or settings.get("servers") or settings.get("mcp_servers") or {}  # else of an editor
        found += [[server["command"], *server["args"]] for server in servers.values()]
    return found


@pytest.mark.parametrize("page", ["docs/agents.md", "docs/agents.zh-CN.md"])
def test_each_documented_client_configuration_starts_the_server(page, project):
    from nanny.agent.server import _parser

    commands = documented_commands(page)
    assert len(commands) == 4
    for command, name, *flags in commands:
        assert (Path(command).name, name) == ("nanny", "mcp")
        assert _parser().parse_args(flags).root
    assert commands == documented_commands("docs/agents.md")


def test_the_skill_names_commands_and_tools_that_exist():
    from nanny.cli import COMMANDS

    text = (REPOSITORY / "skills" / "precision-nanny" / "SKILL.md").read_text(encoding="utf-8")
    head = yaml.safe_load(text.split("---")[1])
    assert set(head) == {"name", "description"}
    assert head["name"] == "precision-nanny"
    assert set(re.findall(r"`nanny ([a-z]+)", text)) <= set(COMMANDS)
    assert set(re.findall(r"\[([a-z_]+)\]", text)) <= set(TOOLS)
