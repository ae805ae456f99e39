"""`make bench-peers`: nanny beside what else can be installed: what each saw of twelve failures, false alarms, and cost.

The failures are the plain loops of `examples/` that have a `--fixed`; mended, the same scripts are the healthy runs. They are
ours: the table shows what the others say of them, not how good nanny is on the code of strangers (README: first contact). A peer
has seen a failure if it raised or printed an alarm by itself, and not the same of the mended script; a log that somebody may read
is none.
`--write` puts the table into docs/performance.md; a peer that is not installed is named as absent.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from .gpt import Training

EXAMPLES = Path(__file__).parent.parent / "examples"


def is_plain_failure(script: str) -> bool:
    """It can be mended, and is a loop of one process on torch alone: a peer need know no framework to see what is wrong."""
    nodes = list(ast.walk(ast.parse(script)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    others = {name for name in names if name != "torch" and name.partition(".")[0] not in sys.stdlib_module_names}
    return '"--fixed" in sys.argv' in script and not others and "torch.compile" not in script


FAILURES = sorted(path.stem for path in EXAMPLES.glob("*.py") if is_plain_failure(path.read_text(encoding="utf-8")))
LONGEST = 60  # characters of what was said
Alarms = list[str]


class Peer(NamedTuple):
    package: str  # that must be there; empty: torch itself
    watch: Callable[[nn.Module, Alarms], AbstractContextManager[None]]
    quiet: bool = False  # it writes a log or curves, and raises no alarm whatever happens
    everywhere: bool = False  # it sees every step of the process, also those of the plain copy, and is on for one step at a time


@contextmanager
def naive_hooks(model: nn.Module, alarms: Alarms) -> Iterator[None]:
    """What people write by hand: every output and every gradient norm, asked whether it is finite."""

    def look(name: str, out: object) -> None:
        if isinstance(out, torch.Tensor) and out.is_floating_point() and not bool(torch.isfinite(out.detach()).all()):
            alarms.append(f"output of {name or 'model'} is not finite")

    def norm(name: str, parameter: nn.Parameter) -> None:
        if parameter.grad is not None and not torch.isfinite(parameter.grad.norm()).item():
            alarms.append(f"gradient of {name} is not finite")

    handles = [module.register_forward_hook(lambda _m, _i, out, n=name: look(n, out)) for name, module in model.named_modules()]
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    handles += [p.register_post_accumulate_grad_hook(lambda p, n=name: norm(n, p)) for name, p in trained]
    yield
    for handle in handles:
        handle.remove()


@contextmanager
def anomaly(model: nn.Module, alarms: Alarms) -> Iterator[None]:
    with torch.autograd.detect_anomaly(check_nan=True):
        yield


@contextmanager
def debug_mode(model: nn.Module, alarms: Alarms) -> Iterator[None]:
    from torch.utils._debug_mode import DebugMode

    with DebugMode(), DebugMode.log_tensor_hashes():
        yield


@contextmanager
def transformers_debug(model: nn.Module, alarms: Alarms) -> Iterator[None]:
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(model)
    yield


@contextmanager
def wandb_watch(model: nn.Module, alarms: Alarms) -> Iterator[None]:
    import wandb

    with tempfile.TemporaryDirectory() as folder:
        run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True))
        run.watch(model, log="all", log_freq=1)
        handle = model.register_forward_pre_hook(lambda *_: run.log({"step": 1}))
        yield
        handle.remove()
        run.finish()


PEERS = {
    "naive hooks": Peer("", naive_hooks),
    "torch.autograd.detect_anomaly": Peer("", anomaly, everywhere=True),  # Lightning's Trainer(detect_anomaly=True) is this one
    "transformers DebugUnderflowOverflow": Peer("transformers", transformers_debug),
    "torch DebugMode with hashes": Peer("", debug_mode, quiet=True, everywhere=True),
    "wandb.watch, every step": Peer("wandb", wandb_watch, quiet=True),
}


def installed(peer: Peer) -> bool:
    return not peer.package or importlib.util.find_spec(peer.package) is not None


@contextmanager
def peer_step(name: str) -> Iterator[Callable[[], None]]:
    """A step of the 7M GPT under a peer."""
    training, peer = Training(), PEERS[name]
    if peer.everywhere:

        def step() -> None:
            with peer.watch(training.model, []):
                training.step()

        yield step
        return
    with peer.watch(training.model, []):
        yield training.step


def said_of(name: str, script: str, *arguments: str) -> str:
    """What a peer says of a script that knows nothing of it: attached to the first model that is called."""
    alarms: Alarms = []
    with contextlib.ExitStack() as stack:

        def attach(model: nn.Module, _inputs: object) -> None:
            first.remove()
            stack.enter_context(PEERS[name].watch(model, alarms))

        first = nn.modules.module.register_module_forward_pre_hook(attach)
        argv, sys.argv = sys.argv, [script, *arguments]
        try:
            runpy.run_path(script, run_name="__main__")
        except (RuntimeError, ValueError) as error:  # how a peer stops a training; the scripts by themselves raise nothing
            alarms.append(str(error))
        finally:
            sys.argv = argv
    return alarms[0] if alarms else ""


def said_by_nanny(script: str, *arguments: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "nanny"]
        subprocess.run([*run, "run", script, *arguments], cwd=folder, check=True, capture_output=True)
        answer = subprocess.run([*run, "diagnose", "--format", "json"], cwd=folder, capture_output=True, text=True)
    causes = json.loads(answer.stdout)
    if causes:
        return f"{causes[0]['cause']}, {Path(causes[0]['where']).name or causes[0]['culprit']}"
    return "not healthy" if answer.returncode else ""


def watch_all(name: str) -> dict[str, str]:
    """By script and arguments, in a process of its own: some peers never let go of a model."""
    command = [sys.executable, "-m", "benchmarks.peers", "--watch", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)  # what went wrong is seen
    answers: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return answers


def watch_here(name: str) -> dict[str, str]:
    answers = {}
    for failure in FAILURES:
        for mended in ((), ("--fixed",)):
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                script = str(EXAMPLES / f"{failure}.py")
                said = said_by_nanny(script, *mended) if name == "nanny" else said_of(name, script, *mended)
            answers[" ".join((failure, *mended))] = said
    return answers


def cells(tool: str, answers: dict[str, str]) -> dict[str, str]:
    """A column of the table, top to bottom."""
    column = {failure: " ".join(answers[failure].split())[:LONGEST].replace("|", "/") or "-" for failure in FAILURES}
    told = [failure for failure in FAILURES if answers[failure] and answers[failure] != answers[f"{failure} --fixed"]]
    column["seen"] = f"{len(told)} of {len(FAILURES)}"
    column["false alarms on the mended ones"] = f"{sum(bool(answers[f'{f} --fixed']) for f in FAILURES)} of {len(FAILURES)}"
    if tool in PEERS and PEERS[tool].quiet:
        column["seen"] += " (raises no alarms: for reading)"
    return column


def costs() -> Iterator[tuple[str, str]]:
    from .bench_monitor import REPEATS, nanny_step
    from .timing import ratio

    peers = {name: partial(peer_step, name) for name, peer in PEERS.items() if installed(peer)}
    steps = {"nanny": partial(nanny_step, 100), **peers}
    for name, make in steps.items():
        plain = Training()
        with contextlib.redirect_stdout(io.StringIO()), make() as step:
            measured = ratio(step, plain.step, REPEATS)
        yield name, f"{measured.median:.2f} (A/A {measured.control:.2f})"


def table(columns: dict[str, dict[str, str]]) -> list[str]:
    names = [name for name in columns if columns[name]]
    rows = [["", *names], ["---"] * (len(names) + 1)]
    rows += [[what, *(columns[name][what] for name in names)] for what in columns["nanny"]]
    absent = [name for name, peer in PEERS.items() if not installed(peer)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [*lines, "", f"Not installed, so not asked: {', '.join(absent)}."] if absent else lines


def main(argv: list[str]) -> int:
    if argv[:1] == ["--watch"]:
        print(json.dumps(watch_here(argv[1])))
        return 0
    columns: dict[str, dict[str, str]] = {}
    for name in ("nanny", *(name for name, peer in PEERS.items() if installed(peer))):
        print(f"{name} ...", file=sys.stderr, flush=True)
        columns[name] = cells(name, watch_all(name))
    for name, cost in costs():
        columns[name]["times a plain step, 7M GPT in FP32"] = cost
    lines = table(columns)
    print("\n".join(lines))
    if "--write" in argv:
        from .__main__ import PAGE, written

        PAGE.write_text(written(PAGE.read_text(), "make bench-peers", lines, "peers"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
