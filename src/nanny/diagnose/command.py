"""`nanny diagnose`: the root causes of what went wrong in a recorded run. Exit code 1 if there are any."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..core.command_line import add_format, add_language, add_run, command_parser
from ..core.plain_json import to_text
from ..core.terminal import say
from ..show.term import width_of
from ..store.files import find_stores
from .run import diagnose
from .text import render_markdown, render_text


def main(argv: Sequence[str]) -> int:
    parser = command_parser("diagnose", "The root causes of what went wrong in a recorded run.")
    add_run(parser)
    add_format(parser, ("text", "json", "markdown"))
    add_language(parser, "the remedy", "en")
    options = parser.parse_args(list(argv))
    path = find_stores(options.db)[0]
    found = [one.in_language(options.lang) for one in diagnose(path, options.run)]
    title = f"run {options.run} in {path}" if options.run else str(path)
    if options.format == "json":
        say(to_text([one.to_json() for one in found]))
    elif options.format == "markdown":
        say(render_markdown(found, title))
    else:
        say(render_text(found, title, min(width_of(sys.stdout), 120)).rstrip())
    return 1 if found else 0
