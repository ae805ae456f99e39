"""Command lines drawn for every command of the table, and one call made in this process, watched for what must never happen.

The flags are those of the parsers themselves, so a command or flag that is added tomorrow is asked as well.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import io
import os
import re
import shutil
import signal
import stat
import sys
import traceback
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from nanny import cli

from .files import ODD_TEXT, all_files, spoil_file, spoil_text

SECONDS = 40  # of the processor: a command that takes more hangs; the slowest whole one takes two
WAITS = 5  # times as long by the clock: the machine may be busy with others
KILLED_AFTER = 300  # if it hangs where no signal reaches
# which of the files an argument of this name is usually about; any other name gets any file
USUAL = {
    "db": ("nanny_logs", "nanny_logs/metrics.db"),
    "file": ("sample.pt", "weights.pt:lin.weight", "weights.safetensors:b", "array.npy", "weights.pt", "arrays.npz"),
    "dump": ("ops", "ops/torch.ops.aten.addmm_inputs.safetensors"),
    "paths": ("train.py", "notes.ipynb", "ds_config.json", "accelerate.yaml", ".", "-"),
    "stdin_filename": ("train.py", "x.ipynb", "x.json"),
    "baseline": ("baseline.json",),
    "model": ("train.py", "train.py:build_model"),
    "input": ("sample.pt",),
    "weights": ("weights.pt",),
    "target": ("sample.pt", "weights.pt:lin.bias", "train.py"),
    "loss": ("train.py:loss",),
    "query": (
        "SELECT * FROM site",
        "SELECT name, shape FROM site",
        "SELECT count(*) FROM sample",
        "SELECT * FROM run",
        "SELECT 1 AS x",
    ),
    "name": ("stem", "head.softmax", "head"),
    "run_a": ("1",),
    "run_b": ("2",),
    "compare": ("1", "nanny_logs/metrics.db:1"),
    "codes": ("NAN", "SCALER", "loss_is_nan"),
    "select": ("SCALER", "NUM"),
    "step": ("1", "0:5", "5", "10"),
    "run": ("1", "2"),
    "scale": ("65536", "1024"),
    "dtype": ("bf16", "fp16"),
    "what": ("loss", "heat"),
    "http": ("8791",),
}
NUMBERS = (
    *("0", "1", "-1", "2", "3", "nan", "inf", "-inf", "1e999", "1e-400", "99999999999999999999", "9" * 5000, "2.5", "x", "٣"),
    *("9223372036854775808", "2147483648", "1e308", "-0", "1e6"),
)
ODD_FLAGS = ("--help", "--no-such-flag", "--db", "--format", "--=", "-x", "--db=--")
BESIDES = re.compile(
    r"nanny: (running the code in|正在运行|.*: skipped|.*read as latin-1|.*was checked|.*findings (are gone|written)|written to )"
)


class Hang(BaseException):
    """The alarm."""


@dataclass(frozen=True)
class Case:
    argv: tuple[str, ...]
    spoilt: str = ""  # file and how
    stdin: bytes = b""


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str
    trouble: str  # empty: as it should be


@cache
def parser_of(command: str) -> argparse.ArgumentParser:
    """The command's own parser, caught when it is about to be used."""

    class Caught(Exception):
        pass

    def catch(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        raise Caught(self)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", catch):
        try:
            cli.main([command])
        except Caught as caught:
            return caught.args[0]
    raise AssertionError(f"nanny {command} parses no arguments")


def draw_case(rng: Random, folder: Path, commands: Sequence[str] = tuple(sorted(cli.COMMANDS))) -> Case:
    """A call: of any command, with odd arguments, or on files of which one (in `folder`, changed here) is odd."""
    command = rng.choice(commands)
    odd_words = rng.random() < 0.5
    words: list[str] = []
    parser = parser_of(command)
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._VersionAction)):
            continue
        needed = action.required or not action.option_strings
        if not needed and rng.random() > (0.8 if action.dest == "db" else 0.15):
            continue
        values = [_value(action, rng, odd_words, folder) for _ in range(_count(action, rng))]
        flag = rng.choice(action.option_strings) if action.option_strings else ""
        words += ([f"{flag}={values[0]}"] if flag.startswith("--") and len(values) == 1 else [flag, *values]) if flag else values
    if odd_words and rng.random() < 0.2:
        words.insert(rng.randrange(len(words) + 1), rng.choice((*ODD_TEXT, *ODD_FLAGS)))
    if rng.random() < 0.02:
        command = rng.choice(ODD_TEXT)
    if rng.random() < 0.02:
        words = []
    spoilt = ""
    if not odd_words or rng.random() < 0.3:
        named = {word.partition("=")[2] or word for word in words}
        near = [path for path in all_files(folder) if _is_named(path, folder, named)]
        path = rng.choice(near or all_files(folder))
        spoilt = f"{path.relative_to(folder)}: {spoil_file(path, rng)}"
    stdin = spoil_text((folder / "train.py").read_bytes(), rng) if "-" in words and (folder / "train.py").is_file() else b""
    return Case((command, *words), spoilt, stdin)


def _is_named(path: Path, folder: Path, named: set[str]) -> bool:
    inside = path.relative_to(folder)
    mine = {str(inside), inside.parts[0]}
    return bool(mine & {word.partition(":")[0] for word in named}) or ("." in named and len(inside.parts) == 1)


def _count(action: argparse.Action, rng: Random) -> int:
    if action.nargs in (0,) or action.nargs is None:
        return 0 if action.nargs == 0 else 1
    return rng.choice((1, 1, 2)) if action.nargs in ("+", "*", "...") else 1


def _value(action: argparse.Action, rng: Random, odd: bool, folder: Path) -> str:
    if odd and rng.random() < 0.5:
        return rng.choice((*ODD_TEXT, *NUMBERS))
    if action.choices is not None:
        return str(rng.choice(list(action.choices)))
    if action.dest in USUAL:
        return rng.choice(USUAL[action.dest])
    if action.dest in ("output", "out", "output_file", "write_baseline", "output_dir"):
        return rng.choice(("out", "out/deeper/x", "train.py/x", "."))
    if action.type in (int, float) or action.metavar in ("N", "S", "X", "GOAL", "A", "B", "R"):
        return rng.choice(NUMBERS[:5] if not odd else NUMBERS)
    files = [str(path.relative_to(folder)) for path in all_files(folder)]
    return rng.choice((*files, rng.choice(ODD_TEXT)))


# One call


@contextlib.contextmanager
def without_servers_and_scripts() -> Iterator[None]:
    """What would serve for ever, run the user's program or look at the hardware is not begun; all before it is."""

    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def place(name: str) -> Any:
        return importlib.import_module(f"nanny.{name}")

    with contextlib.ExitStack() as stack:
        for owner, name, instead in (
            (place("monitor.command"), "start_target", nothing),
            (place("ops.command"), "start_target", nothing),
            (place("web.server").Server, "serve_forever", interrupt),
            (place("cli.demo").subprocess, "Popen", interrupt),
            (place("cli.doctor"), "ask_torch", lambda: {"error": "not asked"}),
            (place("agent.server"), "build_server", interrupt),
            (place("check.command").time, "sleep", interrupt),
        ):
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield


def ask(case: Case, folder: Path, seconds: float = SECONDS) -> Outcome:
    """Calls the command as the shell would, in `folder`; says what went wrong with the call itself."""
    before = _listing(folder)
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=e) for e in ("strict", "backslashreplace"))
    stdin = io.TextIOWrapper(io.BytesIO(case.stdin), encoding="utf-8")
    code, trouble = -1, ""
    with _process_as_it_was(folder), mock.patch.multiple(sys, stdin=stdin, stdout=out, stderr=err):
        try:
            with _alarm(seconds):
                code = cli.main(list(case.argv))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except Hang:
            trouble = "hang: " + "".join(traceback.format_exc(limit=-2))
        except BaseException as error:  # noqa: BLE001
            trouble = "" if _is_of_the_program(error, folder) else "traceback: " + traceback.format_exc(limit=-3)
        _close_monitors()
        with contextlib.suppress(ValueError):
            out.flush()
            err.flush()
    said, warned = (stream.buffer.getvalue().decode("utf-8", "surrogatepass") for stream in (out, err))
    if not trouble:
        trouble = _trouble(case, code, said, warned, before, folder)
    return Outcome(code, said, warned, trouble)


def _is_of_the_program(error: BaseException, folder: Path) -> bool:
    """The user's own file could not be run: its traceback is what the user needs."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):  # it names no file where the source holds a NUL
        return not error.filename or Path(error.filename).is_relative_to(folder)
    return any(Path(file).is_relative_to(folder) for file in files)


def _trouble(case: Case, code: int, out: str, err: str, before: dict[str, tuple[int, int]], folder: Path) -> str:
    raw = raw_characters(out) | raw_characters(err)
    if raw:
        return f"raw: {sorted(map(ascii, raw))} in {ascii(out + err)[:300]}"
    if "Traceback (most recent call last)" in err:
        return f"traceback: printed {err[-300:]}"
    if code not in (-1, 0, 1, 2, 130):  # -1: the traceback of the user's own program
        return f"code: {code}"
    # of two files that were asked for, the first may be written and said so before the second is refused
    said_so = "findings written" in err
    shows_the_rest = "damaged" in err  # what can be read of a store is shown, to a file too
    if code == 2 and _listing(folder) != before and not (shows_the_rest or said_so):
        return f"written: {sorted(set(_listing(folder).items()) ^ set(before.items()))[:3]} though refused: {err[:200]}"
    lines = [line for line in err.splitlines() if not BESIDES.match(line)]
    if code == 2 and (not lines or not lines[-1].startswith("nanny: ") or len(lines) != 1):
        return f"words: {ascii(err)[:300]}"
    if code == 2 and len(lines[-1]) > 4000:
        return f"words: {len(lines[-1])} characters: {ascii(err)[:200]}"
    return ""


def raw_characters(text: str) -> set[str]:
    """What steers a terminal or hides: control characters, escapes, bidi marks, zero widths, halves of surrogates."""
    return {c for c in set(text) - set("\n\t") if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    out = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and not path.name.endswith(("-wal", "-shm")):
            out[str(path.relative_to(folder))] = (status.st_size, status.st_mtime_ns)
    return out


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(*args: Any) -> None:
        raise Hang

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, seconds * WAITS))
    old = [(number, signal.signal(number, ring)) for number, _, _ in timers]
    faulthandler.dump_traceback_later(KILLED_AFTER, exit=True, file=sys.__stderr__)
    for _, timer, length in timers:
        signal.setitimer(timer, length)
    try:
        yield
    finally:
        for _, timer, _ in timers:
            signal.setitimer(timer, 0)
        faulthandler.cancel_dump_traceback_later()
        for number, handler in old:
            signal.signal(number, handler)


@contextlib.contextmanager
def _process_as_it_was(folder: Path) -> Iterator[None]:
    argv, path, modules, here = sys.argv, list(sys.path), set(sys.modules), os.getcwd()
    os.chdir(folder)
    with mock.patch.dict(os.environ), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            os.chdir(here)
            sys.argv, sys.path[:] = argv, path
            for name in set(sys.modules) - modules:
                if name.partition(".")[0] in ("train", "sample", "notes"):
                    del sys.modules[name]


def _close_monitors() -> None:
    """`nanny run` watches until the interpreter ends."""
    from nanny.monitor import command

    for nanny in command._kept:
        with contextlib.suppress(Exception):
            nanny.close()
    command._kept.clear()


class Playground:
    """A folder with all files whole, copied anew for each call."""

    def __init__(self, whole: Path, folder: Path) -> None:
        self.whole, self.folder, self.number = whole, folder, 0

    @contextlib.contextmanager
    def fresh(self) -> Iterator[Path]:
        self.number += 1
        place = self.folder / str(self.number)
        shutil.copytree(self.whole, place)
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


def run_many(
    playground: Playground, seed: int, count: int, commands: Sequence[str] = tuple(sorted(cli.COMMANDS))
) -> list[tuple[int, Case, Outcome]]:
    """Every call that went wrong, with the number that draws it again."""
    wrong = []
    with without_servers_and_scripts():
        for number in range(count):
            with playground.fresh() as folder:
                case = draw_case(Random(f"{seed} {number}"), folder, commands)
                outcome = ask(case, folder)
            if outcome.trouble:
                wrong.append((number, case, outcome))
    return wrong
