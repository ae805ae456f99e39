"""Runs programs plain and watched in processes of their own, and says what the watching changed.

    cd tests
    python -m harmless.harness                                   # every program, every setting, as a table
    python -m harmless.harness --setting default --only lstm     # those whose name or theme contains a word

Every program runs in a process of its own, forked from one that has loaded torch. One that differs is run again before it counts.
What a program does when nobody watches is kept in the temporary folder and holds until its source, the harness or torch changes.
"""

from __future__ import annotations

import argparse
import atexit
import concurrent.futures
import contextlib
import faulthandler
import functools
import gc
import hashlib
import inspect
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Iterator
from importlib.metadata import version as _version
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
SETTINGS = ("default", "every", "trace", "watch_model", "naninf", "compare", "sanitize")
WHOLE_END = ("default",)
SEED = 20
HANG_SECONDS = 150
_KEPT = pathlib.Path(tempfile.gettempdir(), f"nanny-harmless-{os.getuid()}")


class Watched:
    """One tool around a program's steps."""

    def __init__(self, setting: str, models: list[Any], optimizers: list[Any], scaler: Any, output_dir: str) -> None:
        import nanny

        self.setting, self.output_dir = setting, output_dir
        self._model = models[0] if models else None
        self._open: list[Any] = []
        self._others: list[Watched] = []
        self.nanny: Any = None
        self.tracker: Any = None
        if setting in ("default", "every", "trace"):
            arguments: dict[str, Any] = {"every": {"examine": "every"}, "trace": {"trace_interval": 1}}.get(setting, {})
            optimizer: Any = optimizers[0] if len(optimizers) == 1 else optimizers
            self.nanny = nanny.MixedPrecisionNanny(self._model, optimizer or None, scaler, output_dir=output_dir, **arguments)
            for number, model in enumerate(models[1:]):
                self.nanny.add_model(model, f"model{number + 1}.")
        elif setting == "watch_model":
            self.watch = nanny.watch_model(self._model)
        elif setting in ("naninf", "compare"):
            self.tracker = nanny.NanInfTracker() if setting == "naninf" else nanny.CompareWithCPU()
            self.tracker.__enter__()
        else:
            self.sanitize = nanny.sanitize

    @contextlib.contextmanager
    def step(self, i: int) -> Iterator[None]:
        if self.nanny is not None:
            with self.nanny.step(i):
                yield
        elif self.setting == "sanitize":
            with self.sanitize(self._model, step=i):
                yield
        else:
            yield
            if self.tracker is not None:
                self.tracker.step()

    def begin(self, i: int) -> None:
        if self.nanny is not None:
            self.nanny.begin_step(i)
            return
        frame = self.step(i)
        frame.__enter__()
        self._open.append(frame)

    def end(self) -> None:
        if self.nanny is not None:
            self.nanny.end_step()
        elif self._open:
            self._open.pop().__exit__(None, None, None)

    def another(self, model: Any, optimizer: Any = None) -> Watched:
        folder = f"{self.output_dir}/{len(self._others)}"
        other = Watched(self.setting, [model], [optimizer] if optimizer else [], None, folder)
        self._others.append(other)
        return other

    def close(self) -> None:
        while self._others:
            self._others.pop().close()
        while self._open:
            self._open.pop().__exit__(None, None, None)
        if self.nanny is not None:
            self.nanny.close()
        elif self.setting == "watch_model":
            self.watch.remove()
        elif self.tracker is not None:
            self.tracker.__exit__(None, None, None)
            self.tracker = None


def serve(kind: str) -> None:
    """The inside of a server: torch and the programs are loaded once, and every program gets a fork of that moment for itself.

    Reads `setting name` lines and answers each with a line of JSON. Only the server of watched programs has imported the tool.
    """
    import torch

    from . import leftovers, program

    torch.set_num_threads(1)
    builds = program.load_programs()
    _warm_up()
    functions = leftovers.functions()
    if kind != "plain":
        import nanny

        for name in ("MixedPrecisionNanny", "watch_model", "NanInfTracker", "CompareWithCPU", "sanitize"):
            getattr(nanny, name)
    gc.collect()
    gc.freeze()  # torch alone is a million objects; from here on a collection is cheap
    for line in sys.stdin:
        setting, name = line.split()
        folder = tempfile.mkdtemp()
        child = os.fork()
        if not child:
            _be_alone_in(folder)
            write_record(setting, builds[name], functions)
            if setting in WHOLE_END:
                return  # through the end of the interpreter, where a tool may still do harm
            _end_shortly()
        record = _record_of(child, pathlib.Path(folder))
        shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps(record), flush=True)


def _end_shortly() -> None:
    """What is registered for the end, without taking torch apart: that takes longer than most programs."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)


def _be_alone_in(folder: str) -> None:
    """A forked child gets a home, a folder for passing files and streams of its own."""
    os.setpgid(0, 0)
    for name in ("tmp", "home"):
        os.mkdir(f"{folder}/{name}")
    os.environ |= {"TMPDIR": f"{folder}/tmp", "HOME": f"{folder}/home"}
    tempfile.tempdir = None
    os.chdir(folder)
    errors = os.open(f"{folder}/stderr", os.O_CREAT | os.O_WRONLY)
    for stream, number in ((os.open(os.devnull, os.O_RDONLY), 0), (errors, 1), (errors, 2)):
        os.dup2(stream, number)


def write_record(setting: str, build: Any, functions: dict[str, Any]) -> None:
    pid, folder = os.getpid(), os.getcwd()
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    record = run_one(build, setting, functions)
    if os.getpid() != pid:
        os._exit(3)  # the child of a fork inside a step came out of it
    pathlib.Path(folder, "record").write_text(json.dumps(record))


def _record_of(child: int, folder: pathlib.Path) -> dict[str, Any]:
    began = os.times()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # what it started and did not wait for
    tail = f"exit code {status}: {(folder / 'stderr').read_bytes()[-1500:].decode(errors='replace')}"
    if not (folder / "record").exists():
        return {"died": tail}
    record: dict[str, Any] = json.loads((folder / "record").read_text())
    if status:
        record["exit"] = tail
    if strays := os.listdir(folder / "home"):
        record["home"] = strays
    ended = os.times()
    record["cpu"] = round(ended.children_user + ended.children_system - began.children_user - began.children_system, 2)
    return record


def _warm_up() -> None:
    """torch replaces functions of its own when it first compiles: let it, before we look for what the tool replaces."""
    import torch

    model = torch.nn.Linear(2, 2, bias=False)
    model(torch.zeros(1, 2)).sum().backward()
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            kind(list(model.parameters()))  # the first of its class wraps its step
    torch.optim.Adam(model.parameters()).step()
    for backend in ("eager", "aot_eager"):
        torch.compile(model, backend=backend)(torch.zeros(1, 2)).sum().backward()
        torch._dynamo.reset()
    import torch._inductor.compile_fx  # a second of imports, which no program should pay for


def run_one(build: Any, setting: str, functions: dict[str, Any]) -> dict[str, Any]:
    from . import leftovers, program

    started = time.monotonic()
    record: dict[str, Any] = {"error": None, "close_error": None, "state": None}
    folder, output_dir = tempfile.mkdtemp(), tempfile.mkdtemp()
    home = os.getcwd()
    os.chdir(folder)
    gc.collect()
    before = leftovers.surroundings()
    with warnings.catch_warnings(record=True) as caught, _quiet() as chatter:
        warnings.simplefilter("always")
        program.seed_all(SEED)
        made = build(SEED)
        model = weakref.ref(made.models[0]) if made.models else lambda: None
        watch: Any = None
        try:
            watch = (
                Watched(setting, made.models, made.optimizers, made.scaler, output_dir)
                if setting != "plain"
                else program.Unwatched()
            )
            made.run(watch)
        except BaseException as error:  # noqa: BLE001 - a program may end in any way; what counts is that it is the same one
            record["error"] = _error(error)
        try:
            if watch is not None:
                watch.close()
        except BaseException as error:  # noqa: BLE001
            record["close_error"] = _error(error)
        record["state"] = made.state()
        record["marks"] = leftovers.marks(made.models, made.optimizers)
    _train_a_little()
    after = leftovers.surroundings()
    record["left"] = [f"{key}: {before[key]} -> {after[key]}" for key in before if before[key] != after[key]]
    record["replaced"] = leftovers.replaced(functions)
    record["nanny_warnings"] = [str(w.message) for w in caught if w.category.__name__ == "NannyWarning"]
    first_lines = {
        f"{w.category.__name__}: {str(w.message).splitlines()[:1]}" for w in caught if w.category.__name__ != "NannyWarning"
    }
    record["warnings"] = sorted(first_lines)
    record["files"] = leftovers.files_below(folder)
    record["text"] = chatter.getvalue()[-400:]
    record["damaged"] = [] if setting == "plain" else _damaged_records(output_dir)
    tool = weakref.ref(watch.nanny) if getattr(watch, "nanny", None) is not None else lambda: None
    del made, watch, caught
    gc.collect()
    record["freed"] = model() is None
    record["tool_freed"] = tool() is None
    os.chdir(home)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(output_dir, ignore_errors=True)
    record["seconds"] = round(time.monotonic() - started, 2)
    return record


def _damaged_records(folder: str) -> list[str]:
    """What was recorded can be read to the end: a program may have changed what the writer uses."""
    from nanny.runs.runs import verify_runs
    from nanny.store.files import stores_below

    found = verify_runs(folder) if stores_below(pathlib.Path(folder)) else []
    return [run.problem or str(run.lost) for run in found if run.problem or run.lost]


def _train_a_little() -> None:
    """What a program kept of a tool and set again after its end has to go when it is next called."""
    import torch

    with torch.random.fork_rng(), torch.enable_grad(), torch.device("cpu"), contextlib.suppress(Exception):
        weight = torch.ones(2, 2, requires_grad=True)
        optimizer, scaler = torch.optim.SGD([weight], 0.1), torch.amp.GradScaler("cpu")
        torch.autograd.backward(scaler.scale(weight.sum()))
        torch.nn.utils.clip_grad_value_([weight], 1.0)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@contextlib.contextmanager
def _quiet() -> Iterator[io.StringIO]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        yield text


def _error(error: BaseException) -> dict[str, Any]:
    """Type, message and the deepest line of a program: the same with and without a tool."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [f"{pathlib.Path(file).name}:{line}" for file, line in frames if f"{os.sep}programs{os.sep}" in file]
    place = own[-1] if own else ""
    where = [f"{'/'.join(file.split('/')[-3:])}:{line}" for file, line in frames[-1:]]
    return {"kind": type(error).__name__, "message": str(error)[:300], "place": place, "raised_in": where}


def plain_record(name: str) -> dict[str, Any]:
    """The record of a program that nobody watches, from an earlier run where nothing has changed since."""
    place = _KEPT / f"{name}.{_digest(name)}.json"
    if place.exists():
        kept: dict[str, Any] = json.loads(place.read_text())
        return kept
    record = run_program("plain", name)
    if "died" not in record:
        _KEPT.mkdir(parents=True, exist_ok=True)
        partial = place.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        partial.write_text(json.dumps(record))
        partial.replace(place)
    return record


def _digest(name: str) -> str:
    from . import program

    files = [inspect.getfile(program.BUILDS[name]), *(HERE / own for own in ("harness.py", "leftovers.py", "program.py"))]
    texts = [pathlib.Path(file).read_bytes() for file in files]
    surroundings = [_version("torch"), sys.version, *sys.path]  # some programs look at the paths they are found on
    return hashlib.sha256(b"".join([*texts, *(word.encode() for word in surroundings)])).hexdigest()[:16]


class Server:
    """A process that is asked for programs one after the other."""

    def __init__(self, kind: str) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in (str(HERE.parent), *sys.path) if path),
            "PYTHONPYCACHEPREFIX": str(_KEPT / "bytecode"),
            "PYTHONDONTWRITEBYTECODE": "",
            # of what torch compiles only the machine code is shared between programs: it is found by its source
            "TORCHINDUCTOR_CACHE_DIR": str(_KEPT / "inductor"),
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        }
        command = [sys.executable, "-m", "harmless.harness", "--serve", kind]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, setting: str, name: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(setting, name, file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


_servers = threading.local()


def run_program(setting: str, name: str) -> dict[str, Any]:
    """What came of a program in a process of its own; each thread has servers of its own."""
    kind = "plain" if setting == "plain" else "watched"
    if not hasattr(_servers, kind):
        setattr(_servers, kind, Server(kind))
    server: Server = getattr(_servers, kind)
    return server.ask(setting, name)


def harms(plain: dict[str, Any], watched: dict[str, Any]) -> list[str]:
    """What is different, each as `kind: what`; nothing if the promise holds."""
    if "died" in plain:
        return [] if "died" in watched else ["bits: dies alone, lives watched"]
    if "died" in watched:
        return [f"died: {watched['died'][:16]} {watched['died'][-200:]}"]
    found = []
    if _whole(plain["error"]) != _whole(watched["error"]):
        found.append(f"raised: {_sentence(watched['error'])} instead of {_sentence(plain['error'])}")
    if watched["close_error"]:
        found.append(f"raised: close: {_sentence(watched['close_error'])}")
    if plain["state"] != watched["state"]:
        found.append(f"bits: {', '.join(differing(plain['state'], watched['state'])[:4])}")
    if len(watched["nanny_warnings"]) > 1:
        found.append(f"warned: {len(watched['nanny_warnings'])} times: {watched['nanny_warnings'][-1][:120]}")
    more = [text for text in watched["warnings"] if text not in plain["warnings"]]
    fewer = [text for text in plain["warnings"] if text not in watched["warnings"]]
    found += [f"warned: not by itself: {text[:160]}" for text in more]
    found += [f"warned: swallowed: {text[:160]}" for text in fewer]
    if plain["marks"] != watched["marks"]:
        found.append(f"left: marks on {', '.join(differing(plain['marks'], watched['marks'])[:3])}")
    for key in ("left", "replaced", "files"):
        found += [f"left: {text}" for text in watched[key] if text not in plain[key]]
    if plain["freed"] and not watched["freed"]:
        found.append("memory: the model is not freed after close")
    if plain["freed"] and not watched["tool_freed"]:
        found.append("memory: the tool is not freed after close")
    found += [f"record: {text}" for text in watched["damaged"]]
    for key in ("exit", "home"):
        if key in watched and key not in plain:
            found.append(f"left: {key}: {str(watched[key])[-200:]}")
    return found


def _whole(error: dict[str, Any] | None) -> Any:
    return error and (error["kind"], error["message"], error["place"])


def _sentence(error: dict[str, Any] | None) -> str:
    return f"{error['kind']}({error['message'][:140]!r}) at {error['place']} in {error['raised_in']}" if error else "nothing"


def differing(one: Any, two: Any, path: str = "") -> list[str]:
    """Paths of what differs between two JSON values."""
    if isinstance(one, dict) and isinstance(two, dict):
        return [found for key in {**one, **two} for found in differing(one.get(key), two.get(key), f"{path}/{key}")]
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        return [found for i, pair in enumerate(zip(one, two)) for found in differing(*pair, f"{path}/{i}")]
    return [] if one == two else [f"{path} ({str(one)[:60]} / {str(two)[:60]})"]


def harms_of(setting: str, name: str) -> list[str]:
    """What differs for a program, if it differs twice: an overloaded machine may end anything once, the kept plain run too."""
    return harms(plain_record(name), run_program(setting, name)) and harms(run_program("plain", name), run_program(setting, name))


def known_harm() -> dict[tuple[str, str], str]:
    """Lines `program | setting | what happens` of the data file KNOWN_HARM."""
    lines = (HERE / "KNOWN_HARM").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|", 2)] for line in lines if line.strip() and not line.startswith("#")]
    return {(name, setting): what for name, setting, what in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", choices=("plain", "watched"), help=argparse.SUPPRESS)
    parser.add_argument("--setting", action="append", choices=SETTINGS)
    parser.add_argument("--only", default="", help="programs whose name or theme contains one of these words")
    parser.add_argument("--plain-only", action="store_true", help="twice: does each do the same")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    from . import program

    names = [
        name
        for name in program.load_programs()
        if any(word in name or word in program.THEMES[name] for word in args.only.split(","))
    ]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        began = time.monotonic()
        first = dict(zip(names, pool.map(plain_record, names)))
        second = dict(zip(names, pool.map(functools.partial(run_program, "plain"), names))) if args.plain_only else first
        for name in names:
            both = first[name], second[name]
            error = first[name].get("died") or first[name].get("error")
            differs = [] if any("died" in one for one in both) else differing(*(one["state"] for one in both))
            if error or differs:
                print(f"{name} | plain | {str(error)[-300:]} {differs[:3]}".replace("\n", " "), flush=True)
        print(f"{len(names)} programs plain in {time.monotonic() - began:.0f} s", flush=True)
        for setting in () if args.plain_only else args.setting or SETTINGS:
            began, harmed = time.monotonic(), 0
            for name, texts in zip(names, pool.map(functools.partial(harms_of, setting), names)):
                harmed += bool(texts)
                for text in texts:
                    print(f"{name} | {setting} | {text}".replace("\n", " "), flush=True)
            print(f"{setting}: {harmed} of {len(names)} programs harmed in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
