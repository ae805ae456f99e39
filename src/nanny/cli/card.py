"""`nanny card`: the picture of a run to paste into an issue, 1200 x 630.

For instance:

    nanny card -o card.png
    nanny card --run 3 -o card.svg --lang zh
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from ..core.command_line import add_language, add_place, add_run, command_parser, terminal_language
from ..core.finding import NannyError
from ..core.terminal import say
from ..runs.card import card_svg
from ..runs.opening import open_job
from ..runs.summary import summarize


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser("card", "The picture of a run, 1200 x 630: what broke, where, why and what to change.")
    add_run(parser)
    add_language(parser, "the words", chosen_by="the locale")
    add_place(parser, "card.svg", "FILE", ".svg or .png (default: card.svg)")
    args = parser.parse_args(argv)
    kind = args.out.suffix.lower()
    if kind not in (".svg", ".png"):
        raise NannyError(f"{args.out}: a card is an .svg or a .png; name one with -o FILE")
    with open_job(args.db, args.run) as (sources, notes):
        summary = summarize(sources, notes)
        svg = card_svg(summary, terminal_language(args.lang))
    data = svg.encode() if kind == ".svg" else _png(svg)
    try:
        args.out.write_bytes(data)
    except OSError as error:
        raise NannyError(f"cannot write {args.out} ({error.strerror}); name another file with -o FILE") from None
    say(str(args.out))
    return 0


def _png(svg: str) -> bytes:
    if importlib.util.find_spec("resvg_py") is None:
        raise NannyError("a PNG needs one more package: pip install 'precision-nanny[card]'; an .svg needs nothing")
    import resvg_py

    return bytes(resvg_py.svg_to_bytes(svg_string=svg, sans_serif_family="DejaVu Sans", monospace_family="DejaVu Sans Mono"))
