"""Runs programs plain and watched in processes of their own, and says what the watching changed.

    cd tests
    python -m harmless.harness                                   # every program, every setting, as a table
    python -m harmless.harness --setting default --only lstm     # those whose name or theme contains a word

Many programs share a process, for speed. One that dies, or that differs, is run again alone before it counts. What a program does
when nobody watches is kept in the temporary folder and holds until its source, the harness or torch changes.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import hashlib
import inspect
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import weakref
from collections.abc import Iterable, Iterator
from importlib.metadata import version as _version
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
SETTINGS = ("default", "every", "trace", "watch_model", "naninf", "compare", "sanitize")
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


def work(setting: str, names: list[str], results: str) -> None:
    """The inside of one process: runs the named programs and appends a line of JSON for each."""
    import torch

    from . import leftovers, program

    torch.set_num_threads(1)
    builds = program.load_programs()
    _warm_up()
    functions = leftovers.functions()
    if setting != "plain":
        import nanny

        for name in ("MixedPrecisionNanny", "watch_model", "NanInfTracker", "CompareWithCPU", "sanitize"):
            getattr(nanny, name)
    pid = os.getpid()
    gc.collect()
    gc.freeze()  # torch alone is a million objects; from here on a collection is cheap
    with open(results, "a") as out:
        for name in names:
            print(json.dumps({"start": name}), file=out, flush=True)
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            record = run_one(name, builds[name], setting, functions)
            if os.getpid() != pid:
                os._exit(3)  # the child of a fork inside a step came out of it
            print(json.dumps({"name": name, **record}), file=out, flush=True)
            faulthandler.cancel_dump_traceback_later()
            if setting != "plain" and any(
                text.startswith(("global hooks", "dispatch modes", "function modes")) for text in record["left"]
            ):
                return  # the next one deserves a clean process
            _reset_torch()


def _warm_up() -> None:
    """torch replaces functions of its own when it first compiles: let it, before we look for what the tool replaces."""
    import torch

    model = torch.nn.Linear(2, 2, bias=False)
    model(torch.zeros(1, 2)).sum().backward()
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            kind(list(model.parameters()))  # the first of its class wraps its step
    torch.optim.Adam(model.parameters()).step()
    torch.compile(model, backend="eager")(torch.zeros(1, 2))
    torch._dynamo.reset()


def run_one(name: str, build: Any, setting: str, functions: dict[str, Any]) -> dict[str, Any]:
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
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f"{os.sep}programs{os.sep}" in f.filename]
    place = f"{pathlib.Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    deepest = traceback.extract_tb(error.__traceback__)[-1:]
    where = [f"{'/'.join(f.filename.split('/')[-3:])}:{f.lineno}" for f in deepest]
    return {"kind": type(error).__name__, "message": str(error)[:300], "place": place, "raised_in": where}


def _reset_torch() -> None:
    import torch

    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    torch.autograd.set_detect_anomaly(False)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def plain_records(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The record of each program that nobody watches, from an earlier run where nothing has changed since."""
    names = list(names)
    company = "alone" if len(names) == 1 else "together"
    places = {name: _KEPT / f"{name}.{company}.{_digest(name)}.json" for name in names}
    kept = {name: json.loads(place.read_text()) for name, place in places.items() if place.exists()}
    made = run_programs("plain", [name for name in names if name not in kept])
    _KEPT.mkdir(parents=True, exist_ok=True)
    for name, record in made.items():
        if "died" not in record:
            partial = places[name].with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(record))
            partial.replace(places[name])
    return kept | made


def _digest(name: str) -> str:
    from . import program

    files = [inspect.getfile(program.BUILDS[name]), *(HERE / own for own in ("harness.py", "leftovers.py", "program.py"))]
    texts = [pathlib.Path(file).read_bytes() for file in files]
    return hashlib.sha256(b"".join([*texts, _version("torch").encode(), sys.version.encode()])).hexdigest()[:16]


def run_programs(setting: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The record of each program, from as few processes as their health allows."""
    records: dict[str, dict[str, Any]] = {}
    waiting = list(names)
    while waiting:
        done, died, tail = _process(setting, waiting)
        records |= done
        if died:
            records[died] = {"died": tail}
        left = [name for name in waiting if name not in records]
        if len(left) == len(waiting):
            records |= {name: {"died": tail} for name in left}
            break
        waiting = left
    return records


def _process(setting: str, names: list[str]) -> tuple[dict[str, dict[str, Any]], str | None, str]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        results = pathlib.Path(folder, "results.jsonl")
        results.touch()
        home = pathlib.Path(folder, "home")
        for name in ("tmp", "home"):
            pathlib.Path(folder, name).mkdir()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "TMPDIR": f"{folder}/tmp",
            "HOME": str(home),
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in (str(HERE.parent), *sys.path) if path),
        }
        command = [sys.executable, "-m", "harmless.harness", "--work", setting, str(results)]
        with open(f"{folder}/stderr", "w+") as stderr:
            # names over stdin: there may be more than a command line holds
            ended = subprocess.run(
                command, cwd=folder, env=environment, input="\n".join(names), text=True, stdout=stderr, stderr=stderr, check=False
            )
            stderr.seek(0)
            tail = f"exit code {ended.returncode}: {stderr.read()[-1500:]}"
        lines = [json.loads(line) for line in results.read_text().splitlines()]
        done = {line["name"]: line for line in lines if "name" in line}
        begun = [line["start"] for line in lines if "start" in line]
        died = begun[-1] if begun and begun[-1] not in done else None
        if ended.returncode and died is None and done:
            done[begun[-1]]["exit"] = tail
        strays = os.listdir(home)
        if strays and done:
            done[begun[-1]]["home"] = strays
        return done, died, tail


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


def suspects(setting: str, names: Iterable[str], plain: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """What differs for programs that share their processes."""
    names = list(names)
    watched = run_programs(setting, names)
    return {name: found for name in names if (found := harms(plain[name], watched[name]))}


def harmed_alone(setting: str, names: Iterable[str]) -> dict[str, list[str]]:
    """What differs for programs in a process each, so that none answers for another."""
    found = {name: harms(plain_records([name])[name], run_programs(setting, [name])[name]) for name in names}
    return {name: texts for name, texts in found.items() if texts}


def known_harm() -> dict[tuple[str, str], str]:
    """Lines `program | setting | what happens` of the data file KNOWN_HARM."""
    lines = (HERE / "KNOWN_HARM").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|", 2)] for line in lines if line.strip() and not line.startswith("#")]
    return {(name, setting): what for name, setting, what in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", nargs=2, metavar=("SETTING", "RESULTS"), help=argparse.SUPPRESS)
    parser.add_argument("--setting", action="append", choices=SETTINGS)
    parser.add_argument("--only", default="")
    parser.add_argument("--plain-only", action="store_true", help="twice: does each do the same")
    parser.add_argument("--in-company", action="store_true", help="count what differs without asking again alone")
    args = parser.parse_args()
    if args.work:
        work(args.work[0], sys.stdin.read().split(), args.work[1])
        return
    from . import program

    names = [
        name
        for name in program.load_programs()
        if any(word in name or word in program.THEMES[name] for word in args.only.split(","))
    ]
    first = plain_records(names)
    second = run_programs("plain", names[::-1]) if args.plain_only else first
    for name in names:
        error = first[name].get("died") or first[name].get("error")
        differs = (
            [] if "died" in first[name] or "died" in second[name] else differing(first[name]["state"], second[name]["state"])
        )
        if error or differs:
            print(f"{name} | plain | {str(error)[-300:]} {differs[:3]}".replace("\n", " "), flush=True)
        if "died" not in first[name] and first[name]["seconds"] > 5:
            print(f"{name} takes {first[name]['seconds']} s", flush=True)
    print(f"{len(names)} programs plain", flush=True)
    for setting in () if args.plain_only else args.setting or SETTINGS:
        found = suspects(setting, names, first)
        if not args.in_company:
            found = harmed_alone(setting, found)
        for name, texts in found.items():
            for text in texts:
                print(f"{name} | {setting} | {text}".replace("\n", " "), flush=True)
        print(f"{setting}: {len(found)} of {len(names)} programs harmed", flush=True)


if __name__ == "__main__":
    main()
