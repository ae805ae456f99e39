"""`nanny completion bash`: the script that makes Tab complete commands and flags.

nanny completion bash > ~/.local/share/bash-completion/completions/nanny
nanny completion zsh > "${fpath[1]}/_nanny"
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..core.command_line import command_parser
from ..core.terminal import say

SHELLS = ("bash", "zsh")


def main(argv: Sequence[str]) -> int:
    parser = command_parser("completion", __doc__)
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    shell = parser.parse_args(argv).shell
    say((Path(__file__).parent / "shells" / f"nanny.{shell}").read_text(encoding="utf-8").rstrip("\n"))
    return 0
