"""Would this run have survived in FP16, BF16 or FP8? Answered from the exponent histograms on
record, without running anything.

Outputs and weights are judged as they are: no loss scale reaches the forward pass. Gradients are
judged under the best dynamic loss scale there is (or --scale S, held fixed), by the energy they
lose. FP8 is judged with a scale for each tensor, as its recipes have; --scale 1 judges it without.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.finding import NannyError, Severity
from ..core.formats import BF16, FP16, TARGETS, Format, format_of
from ..core.limits import Limits
from ..core.numbers import counted, listed, share, short, shortened
from ..show.findings import STYLES
from ..show.spark import sparkline
from ..show.tables import Answer, Column, Line, Table
from ..store import reader
from .fates import BACKWARD, FORWARD, Fate
from .imagined import Imagined, imagine, is_low
from .lossscale import START_BITS
from .source import Source, open_run, positive, title_of

SHOWN = 15
SHOWN_IF_ALL_FIT = 5
MOST_NAME = 80  # characters of a layer's name in a sentence
MARGIN_BITS = 3  # below the largest scale that fits, so that the first larger batch does not overflow
NOUNS = {"output": "output", "weight": "weight", "output_grad": "gradient of an output", "grad": "gradient of a weight"}
PLURALS = {"output_grad": "gradients of outputs", "grad": "gradients of weights"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", required=True, choices=TARGETS, help="the format to imagine")
    parser.add_argument("--scale", type=float, metavar="S", help="a fixed loss scale, a power of two (default: the best one)")
    parser.add_argument("--layer", metavar="GLOB", help="only layers whose name matches, such as 'encoder.*'")
    parser.add_argument("--limit", type=positive, metavar="N", help=f"rows of the table in text and markdown (default: {SHOWN})")


def answer(args: argparse.Namespace) -> Answer:
    target = format_of(args.dtype)
    with open_run(args.db, args.run) as source:
        result = imagine(source, target, scale_bits(args.scale), Limits(), args.layer)
        remarks = [*_scale_remarks(result), *_remarks(source, result)]
        title = title_of(source)
        was = _upper(format_of(source.run.amp_dtype or "fp32"))
        command = source.command
        broken = first_nonfinite_loss(source)
        if broken is not None and broken == _first_loss(source):
            raise NannyError(
                f"the loss of run {source.run.id} is not finite from its first step ({broken}) on, so no format can be imagined; "
                f"`{command('summary')}` says what came first"
            )
    headline = verdict(result, was)
    if broken is not None:
        died = f"This {was} run did NOT SURVIVE as it was: its loss is not finite from step {broken} on."
        headline = f"{died} Of what came before: {headline}"
    reasons = _reasons(result)
    good = result.survives if broken is None else False
    lines = [Line(headline, {True: "good", None: "warning", False: "error"}[good], 4)]
    lines += [Line(f"  - {reason}", indent=4) for reason in reasons]
    lines += [Line(""), Line(title, indent=4), *(Line(remark, indent=4) for remark in remarks)]
    following = [command("layer", result.fates[0].site)]
    if args.scale is not None:
        following.append(command("whatif", "--dtype", args.dtype))
    elif target == FP16 and not result.survives:
        following.append(command("whatif", "--dtype", "bf16"))
    return Answer(
        lines=lines,
        tables=[_table(result, args.limit)],
        flat=_flat(result),
        data={"from": was, "verdict": headline.rstrip(":"), "reasons": reasons, "remarks": remarks, **_data(result)},
        next=following,
    )


def first_nonfinite_loss(source: Source) -> int | None:
    steps, values = reader.scalars(source.db, source.run.id, ["loss"]).get("loss", ((), ()))
    return next((int(step) for step, value in zip(steps, values) if not math.isfinite(value)), None)


def _first_loss(source: Source) -> int | None:
    losses = reader.scalars(source.db, source.run.id, ["loss"]).get("loss")
    return None if losses is None else int(losses[0][0])


def scale_bits(scale: float | None) -> int | None:
    if scale is None:
        return None
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5:
        hint = f"; try {2.0 ** round(math.log2(scale)):g}" if 0 < scale < math.inf else ""
        raise NannyError(f"--scale {scale:g} is not a power of two, and histograms answer only for those{hint}")
    return exponent - 1


def verdict(result: Imagined, was: str) -> str:
    run = f"This {was} run"
    name = _upper(result.target)
    if result.survives is False:
        return f"{run} WOULD NOT SURVIVE in {name}, because:"
    if result.survives is None:
        return f"{run} WOULD SURVIVE in {name} WITH LOSSES:"
    if result.own_scale or result.target == BF16:
        return f"{run} WOULD SURVIVE in {name} as far as range goes: nothing on record leaves it."
    if _starts_too_low(result):
        return f"{run} WOULD SURVIVE in {name} if its loss scale starts high enough, see below."
    return f"{run} WOULD SURVIVE in {name}: everything on record fits, gradients with the right loss scale."


def _reasons(result: Imagined) -> list[str]:
    out = [_sentence(group, result) for group in result.reasons]
    if result.too_many_skips and result.path is not None:
        what = "this loss scale" if result.path.fixed else "any loss scale"
        out.insert(0, f"gradients overflow under {what}: {share(result.path.skip_rate)} of the steps would be skipped")
    return out


def _sentence(group: Sequence[Fate], result: Imagined) -> str:
    worst, many = group[0], len(group) > 1
    what = counted(len(group), NOUNS[worst.kind], PLURALS.get(worst.kind, ""))
    site = shortened(worst.site, MOST_NAME)
    others = f"; also {listed([shortened(fate.site, MOST_NAME) for fate in group[1:]], 2)}" if many else ""
    reach = f"{site} reaches {short(worst.peak)} at step {worst.peak_step}"
    end = f"{_upper(result.target)} {'ends' if result.target.has_inf else 'saturates'} at {short(result.target.max)}"
    if worst.why == "overflows":
        first = f" (too large from step {worst.first_overflow} on)" if worst.first_overflow != worst.peak_step else ""
        return f"{what} would overflow: {reach}{first}, {end}; no loss scale can help{others}"
    if worst.why == "close to overflow":
        return f"{what} would come within a factor of two of overflow: {reach}, {end}{others}"
    if worst.why == "loses digits":
        return f"{what} would keep fewer digits: {share(worst.subnormal_energy)} of {site} is subnormal (by energy){others}"
    fixed = result.path is not None and result.path.fixed
    scale = " at this loss scale" if fixed else " even at the best loss scale"
    when = scale if worst.kind in BACKWARD else "; no loss scale can help"
    verb = "become zero" if worst.why == "becomes zero" else "lose energy"
    when += ", but no longer at the end" if worst.flushed_energy_at_end < worst.flushed_energy / 2 else ""
    return f"{what} would {verb}: {site} loses {share(worst.flushed_energy)} of its energy to zero{when}{others}"


def _starts_too_low(result: Imagined) -> bool:
    return result.path is not None and not result.path.fixed and (result.needed_bits or 0) > START_BITS


def _scale_remarks(result: Imagined) -> list[str]:
    path = result.path
    if path is None:
        return []
    skips = f"{share(path.skip_rate)} of the steps would be skipped"
    if path.fixed:
        return [f"loss scale 2**{path.best_bits} as given: {skips}"]
    low = "" if result.needed_bits is None else f", usable from 2**{result.needed_bits} on"
    out = [f"best loss scale: 2**{path.best_bits}{low}; {skips}"]
    if len(set(path.limit_bits.tolist())) > 1:
        curve = sparkline(path.limit_bits.tolist(), 60)
        out += ["largest loss scale that fits, over time:", f"  {curve}"]
    if _starts_too_low(result):
        start = max(path.best_bits - MARGIN_BITS, result.needed_bits or 0)
        out.append(
            f"GradScaler starts at 2**{START_BITS}, where gradients flush to zero here, and doubles only every 2000 steps: "
            f"use GradScaler(init_scale=2.0**{start})"
        )
    return out


def _remarks(source: Source, result: Imagined) -> list[str]:
    target, out = result.target, []
    if target == BF16:
        out.append(
            "BF16 has the range of FP32, so checks for underflow are pointless and their zeros prove nothing; what BF16 lacks "
            "is digits (2 to 3), and histograms cannot show that"
        )
    if result.own_scale:
        out.append(
            f"each tensor has its own scale here, as FP8 recipes give it; {_upper(target)} keeps {target.significand} "
            "significant bits, and histograms cannot show whether that is enough"
        )
    if is_low(source):
        low = source.run.amp_dtype
        stay = f", {counted(result.spared, 'output')} that stayed in FP32 left out" if result.spared else ""
        out.append(f"the run was recorded under {low} autocast{stay}; what {low} had already lost is not on record")
    elif target == FP16:
        out.append("autocast keeps some outputs in FP32 (norms, softmax and losses on CUDA): such a culprit is spared there")
    if result.stride > 1:
        out.append(f"a long run: shares are of one in {result.stride} of its traced steps, magnitudes of all")
    ratios = reader.scalars(source.db, source.run.id, ["update_ratio"]).get("update_ratio")
    if ratios is not None and target.bits == 16 and np.isfinite(ratios[1]).any():
        ratio, half_step = float(np.nanmedian(ratios[1])), target.unit_roundoff / 2
        if ratio < half_step:
            out.append(
                f"even the largest updates are only {short(ratio)} of their weights, less than half a rounding step "
                f"({short(half_step)}): with weights in {_upper(target)} and no FP32 copy of them, most would be rounded away"
            )
    return out


def _upper(target: Format) -> str:
    return target.name.upper().replace("_", " ")


def _table(result: Imagined, limit: int | None) -> Table:
    columns = (
        Column("layer", elastic=True), Column("kind"), Column("verdict"), Column("peak"), Column("flushed", show=share),
        Column("subnormal", show=share), Column("energy", "energy lost", show=share), Column("history", "over time"),
    )  # fmt: skip
    rows = []
    for fate in result.fates:
        word = f"{fate.why} {fate.overflow_steps}/{len(fate.steps)}" if fate.why == "overflows" else fate.why or "fits"
        curve = sparkline(fate.history, 12, log=fate.kind in FORWARD)
        rows.append([fate.site, fate.kind, word, fate.peak, fate.flushed, fate.subnormal, fate.flushed_energy, curve])
    styles = ["" if fate.severity is None else STYLES[fate.severity] for fate in result.fates]
    most = limit or (SHOWN if result.reasons else SHOWN_IF_ALL_FIT)
    sick = sum(fate.severity is not None for fate in result.fates[most:])
    rest = f"tensors, {sick} of which do not fit" if sick else "tensors, all of which fit"
    return Table(columns, rows, most=most, rest=rest, styles=styles)


def _flat(result: Imagined) -> Table:
    names = [name for name in vars(result.fates[0]) if name not in ("history", "steps")]
    rows = [[_by_name(getattr(fate, name)) for name in names] for fate in result.fates]
    return Table(tuple(Column(name) for name in names), rows)


def _by_name(value: Any) -> Any:
    return value.name if isinstance(value, Severity) else value


def _data(result: Imagined) -> dict[str, Any]:
    path = result.path
    scales = path and {
        "best": 2.0**path.best_bits,
        "smallest_usable": None if result.needed_bits is None else 2.0**result.needed_bits,
        "skip_rate": path.skip_rate,
        "fixed": path.fixed,
        "steps": path.steps.tolist(),
        "limit_bits": path.limit_bits.tolist(),
        "bits": path.bits.tolist(),
    }
    return {
        "dtype": result.target.name,
        "survives": result.survives is not False,
        "with_losses": result.survives is None,
        "loss_scale": scales,
        "layers": [vars(fate) for fate in result.fates],
    }
