"""`nanny demo`: a training with two mistakes, told from before its first step to the curve of the mended script.

    nanny demo                   # the story, in a folder `demo`
    nanny demo --list            # the examples: one script for each family of failures and each framework
    nanny demo lost_updates      # one of them under the monitor, and the same with its fix

Everything happens on the spot: scripts are copied into the folder and run in processes of their own, as a user would run them.
"""

from __future__ import annotations

import ast
import difflib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..core.command_line import add_language, add_place, command_parser, made_folder, terminal_language
from ..core.finding import NannyError
from ..core.numbers import nearest
from ..show.translation import translate

STORY = "two_mistakes"
BROKEN_NORM = "        return x / (x * x)"
MENDED_NORM = "        x = x.float()\n        return x / (x * x)"


def examples_folder() -> Path:
    """Beside the package when it was installed, beside `src` in a clone."""
    package = Path(__file__).parents[1]
    inside = package / "examples"
    return inside if inside.is_dir() else package.parents[1] / "examples"


def titles() -> dict[str, str]:
    """The examples by name, each with the first line of its text."""
    out = {}
    for path in sorted(examples_folder().glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        out[path.stem] = text.partition("\n")[0]
    return out


def command() -> str:
    """What to type here: `nanny` may lie in an environment that is not switched on."""
    if shutil.which("nanny"):
        return "nanny"
    program = Path(sys.argv[0])
    return shlex.quote(str(program)) if program.name == "nanny" and program.is_file() else "python -m nanny"


class Teller:
    def __init__(self, folder: Path, language: str) -> None:
        self.folder = folder
        self.language = language

    def say(self, text: str) -> None:
        print(translate(text, self.language), flush=True)

    def chapter(self, title: str) -> None:
        print(f"\n=== {translate(title, self.language)}\n", flush=True)

    def type(self, *words: str) -> int:
        """Runs one command of nanny as if it were typed in the folder, and shows it with all that it prints."""
        print(f"$ nanny {shlex.join(words)}", flush=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "nanny", *words],
            cwd=self.folder,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"},  # networks this small run faster on one thread
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(f"  {line}".rstrip(), flush=True)
        return process.wait()


def tell_story(tell: Teller) -> None:
    script = tell.folder / "train.py"
    shutil.copy(examples_folder() / f"{STORY}.py", script)
    tell.say(f"A training script in FP16 with two mistakes is copied to {script}; about half a minute.")
    language = () if tell.language == "en" else ("--lang", tell.language)

    tell.chapter("1. Before: what the source alone shows")
    tell.type("check", "train.py")
    tell.say("\nIt can mend this by itself:\n")
    if tell.type("check", "train.py", "--fix") == 2:
        raise NannyError("the demo needs the extra `fix`: pip install 'precision-nanny[fix]'")

    tell.chapter("2. During: the script as it is, under the monitor")
    tell.say("What is left depends on the data, so no source shows it, and nothing turns NaN: the model only learns badly.\n")
    tell.type("run", "train.py")

    tell.chapter("3. What to change, and what comes of it")
    before = script.read_text(encoding="utf-8")
    after = before.replace(BROKEN_NORM, MENDED_NORM)
    for line in list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1))[2:]:
        print(f"  {line}")
    script.write_text(after, encoding="utf-8")
    print()
    tell.type("run", "train.py")

    tell.chapter("4. To show it to others")
    tell.type("summary", "--run", "1", *language)
    tell.type("card", "--run", "1", "-o", "card.svg", *language)
    tell.type("report", "--run", "1", "-o", "report.html", *language)
    print()
    tell.say(f"{tell.folder / 'report.html'} opens in any browser, without a network.")


def tell_example(tell: Teller, name: str) -> None:
    path = examples_folder() / f"{name}.py"
    shutil.copy(path, tell.folder / path.name)
    if name == STORY:
        tell_story(tell)
        return
    first_lines = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    if not first_lines.partition("\n\n")[2].startswith("nanny run "):  # a launcher, or a nanny of its own
        print(first_lines)
        tell.say(f"\nThis one is run as its first lines say; it is copied to {tell.folder / path.name}.")
        return
    print(titles()[name])
    tell.chapter("1. As it is")
    tell.type("run", path.name)
    tell.chapter("2. With its fix")
    tell.type("run", path.name, "--fixed")


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser("demo", __doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="an example of --list (default: the story)")
    parser.add_argument("--list", action="store_true", help="the examples, a line each")
    add_place(parser, "demo", "DIR", "where to record (default: demo)")
    add_language(parser, "what is said", chosen_by="the locale")
    options = parser.parse_args(argv)
    known = titles()
    if options.list:
        for name, title in known.items():
            print(f"{name:<20} {title}")
        return 0
    if options.name is not None and options.name not in known:
        raise NannyError(f"there is no example {options.name!r}{nearest(options.name, known)}; all of them: nanny demo --list")
    tell = Teller(made_folder(options.out / (options.name or ""), "--out DIR"), terminal_language(options.lang))
    if options.name is None:
        tell_story(tell)
    else:
        tell_example(tell, options.name)
    tell.say(f"\nMore: {command()} demo --list. Your own run, without changing it: {command()} run train.py")
    return 0
