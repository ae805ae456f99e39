"""What commands share: the flags (--db, --run, --format, -o, --lang), spelt and explained alike, and where a result goes."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from .finding import NannyError
from .numbers import nearest
from .terminal import complain, say, visible_lines

if TYPE_CHECKING:
    from pathlib import Path

LANGUAGES = ("en", "zh")
LARGEST = 2**63 - 1  # what SQLite calls an integer
# The last lines of `nanny COMMAND --help`, of commands whose description shows none; tests/docs runs them.
EXAMPLES = {
    "check": ("src --device cuda", "src --diff", "src --format sarif -o nanny.sarif"),
    "lsp": ("--stdio",),
    "tensor": ("grads.pt:layer1.weight --dtype fp16",),
    "diff": ("--model model.py:build --input sample.pt --dtype bf16 --advise",),
    "trace": ("--sanitize train.py ARGS...", "--nan train.py ARGS..."),
    "replay": ("DUMP",),
    "run": ("train.py ARGS...", "--dump-on-error train.py ARGS..."),
    "diagnose": ("", "--run 2 --format json"),
    "summary": ("", "--run 2 --format json"),
    "alerts": ("--severity error --layer 'blocks.*'", "--fail-on error"),
    "stats": ("", "--run 2 --format json"),
    "layer": ("fc.weight",),
    "runs": ("", "--db nanny_logs --verify"),
    "compare": ("1 2",),
    "whatif": ("--dtype fp16",),
    "export": ("-o folder --format csv",),
    "snapshot": ("run.db",),
    "tail": ("",),
    "ui": ("", "--db nanny_logs --port 0"),
    "card": ("-o card.svg",),
    "plot": ("-o pictures",),
    "rule": ("SCALER_CLIP_BEFORE_UNSCALE", "update_lost"),
    "doctor": ("", "--format json"),
}


def examine_command(argv: Sequence[str], step: int | None) -> str:
    """What would prove a cause: the script again, and the step that went wrong beside FP32."""
    at = ["--start-step", str(step)] if step else []
    return shlex.join(["nanny", "trace", "--sanitize", *at, *(argv or ["SCRIPT"])])


class Parser(argparse.ArgumentParser):
    """A wrong argument is one sentence, like everything else that the user can fix."""

    def format_help(self) -> str:
        shown = [f"  {self.prog} {words}".rstrip() for words in EXAMPLES.get(self.prog.removeprefix("nanny "), ())]
        return super().format_help() + "".join(f"{line}\n" for line in (["", "examples:", *shown] if shown else []))

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        near = nearest(unknown[1], self._option_string_actions) if unknown else ""
        raise NannyError(f"{message}{near or ';'} type `{self.prog} --help`")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> object:
        if arg_strings == ["--"] and action.option_strings:  # `--db=--`, of which argparse would make a list
            self.error(f"argument {'/'.join(action.option_strings)}: expected one argument")
        return super()._get_values(action, arg_strings)


def check_words(words: Sequence[str]) -> None:
    """No shell can pass such words, but a program can, and no file has such a name."""
    for word in words:
        try:
            os.fsencode(word)
        except UnicodeEncodeError:
            raise NannyError(f"the argument {word!r} is no text; write it in {sys.getfilesystemencoding()}") from None
        if "\0" in word:
            raise NannyError(f"the argument {word!r} holds a NUL character; leave it out")


def refused_by_the_system(error: OSError | MemoryError, command: str) -> str:
    """What a file system, a name or the memory refused: no command can foresee all of it."""
    if isinstance(error, MemoryError):
        return f"`{command}` needs more memory than there is; ask about less, or on a larger machine"
    places = " and ".join(os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes)))
    reason = f"{places}: {error.strerror}" if places else error.strerror or str(error)
    return f"{reason}; `{command}` cannot go on, name another file or folder"


@contextmanager
def refusals_in_words(command: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, MemoryError) as error:
        raise NannyError(refused_by_the_system(error, command)) from error


def exit_code_of(run: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """0: clean, 1: findings, 2: usage or internal error."""
    try:
        return run(argv)
    except NannyError as error:
        complain(str(error))
        return 2
    except BrokenPipeError:  # `nanny alerts | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def command_parser(name: str, description: str | None) -> Parser:
    """A parser that shows its description as it was written."""
    return Parser(
        prog=f"nanny {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Which recorded run."""
    parser.add_argument("--db", metavar="PATH", help="a metrics.db or its folder (default: the newest under nanny_logs)")
    parser.add_argument("--run", type=whole, metavar="N", help="number of the run in it, see `nanny runs` (default: the newest)")


def add_format(parser: argparse.ArgumentParser, formats: Sequence[str]) -> None:
    parser.add_argument("--format", choices=tuple(formats), default=formats[0], help=f"default: {formats[0]}")


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", type=writable, metavar="FILE", help="write there instead of to the terminal")


def add_place(parser: argparse.ArgumentParser, default: str, metavar: str, help: str) -> None:
    """Where a command writes that always writes files."""
    from pathlib import Path  # brings urllib and ipaddress, and most commands do without

    parser.add_argument("-o", "--output", "--out", dest="out", type=Path, default=Path(default), metavar=metavar, help=help)


def made_folder(path: Path, flag: str = "-o DIR") -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NannyError(f"cannot write to {path} ({error.strerror}); name another folder with {flag}") from None
    return path


def writable(path: str) -> str:
    """Asked before any work is done."""
    folder = os.path.dirname(path) or "."
    why = "no such folder" if not os.path.isdir(folder) else "a folder" if os.path.isdir(path) else ""
    if why or not os.access(path if os.path.exists(path) else folder, os.W_OK):  # /dev/stdout can be written, /dev cannot
        raise NannyError(f"{path}: cannot be written ({why or 'not allowed'}); name another --output FILE")
    return path


def terminal_language(given: str | None) -> str:
    """What `--lang` says, else Chinese where the locale is, else English."""
    locale = next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := os.environ.get(name))), "")
    return given or ("zh" if locale.lower().startswith("zh") else "en")


def add_language(parser: argparse.ArgumentParser, of: str, chosen_by: str = "the browser") -> None:
    """Without it the choice is left to the browser, or to `terminal_language`."""
    parser.add_argument("--lang", choices=LANGUAGES, help=f"language of {of} (default: {chosen_by}'s language)")


def add_result(parser: argparse.ArgumentParser, formats: Sequence[str], of: str) -> None:
    """How a command gives its result: format, file, and language if the locale chooses it."""
    add_format(parser, formats)
    add_output(parser)
    add_language(parser, of, chosen_by="the locale")


def whole(text: str) -> int:
    """An integer that the store can hold."""
    try:
        number = int(text) if len(text) < 30 else None
    except ValueError:
        number = None
    if number is None or abs(number) > LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:30]!r} is no whole number of at most 18 digits")
    return number


def positive(text: str) -> int:
    number = whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return number


def above_zero(text: str, most: float, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= most:
        raise argparse.ArgumentTypeError(f"{text[:30]!r} is no {what}")
    return number


def seconds(text: str) -> float:
    """A time to wait: not longer than a day."""
    return above_zero(text, 86400, "number of seconds above 0 and up to 86400")


def port(text: str) -> int:
    number = whole(text)
    if not 0 < number < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; take one from 1024 to 65535")
    return number


def write_result(text: str, output: str | None, colour: bool = False) -> None:
    """To the terminal unless there is an `--output FILE`."""
    if not output:
        say(text, colour=colour)
        return
    try:
        with open(output, "w", encoding="utf-8") as stream:
            stream.write(visible_lines(text) + "\n")
    except OSError as error:
        raise NannyError(f"{output}: cannot be written ({error.strerror or error}); name another --output FILE") from None
    complain(f"written to {output}")
