"""How a run imagined in another format looks: the verdict, the reasons, what else to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.finding import Severity
from ...core.formats import BF16, FP16, Format
from ...core.numbers import amount, join_names, number, share, short, shorten
from ...show.findings import STYLES
from ...show.spark import sparkline
from ...show.tables import Answer, Column, Line, Table
from ..source import title_of
from ..what_if import BACKWARD, FORWARD, START_BITS, Outcome, WhatIf

OUTCOMES_SHOWN = 15
OUTCOMES_SHOWN_IF_ALL_FIT = 5
MOST_NAME = 80  # characters of a layer's name in a sentence
MARGIN_BITS = 3  # below the largest scale that fits, so that the first larger batch does not overflow

_NOUNS = {"output": "output", "weight": "weight", "output_grad": "gradient of an output", "grad": "gradient of a weight"}
_PLURALS = {"output_grad": "gradients of outputs", "grad": "gradients of weights"}


def what_if_answer(result: WhatIf, limit: int | None) -> Answer:
    headline, reasons = what_if_headline(result), what_if_reasons(result)
    good = False if result.died or result.wrong is not None else result.survives
    opens = "" if headline.endswith(".") else ":"
    lines = [Line(f"{headline}{opens}", {True: "good", None: "warning", False: "error"}[good], 4)]
    lines += [Line(f"  - {reason}", indent=4) for reason in reasons]
    remarks = what_if_remarks(result)
    lines += [Line(""), Line(title_of(result.source), indent=4), *(Line(remark, indent=4) for remark in remarks)]
    return Answer(
        lines=lines,
        tables=[_outcome_table(result, limit)],
        flat=_outcome_rows(result.outcomes),
        data={
            "from": _recorded_format(result),
            "verdict": headline,
            "reasons": reasons,
            "remarks": remarks,
            **_what_if_data(result),
        },
        next=_after_what_if(result),
    )


def what_if_headline(result: WhatIf) -> str:
    """What became of the run as it was, if it died, and what would have become of it."""
    died = how_it_died(result)
    if died and result.own_format:
        return f"{died[:-1]}, and could not, because" if result.reasons else died
    imagined = what_if_verdict(result)
    return f"{died} Of what came before: {imagined}" if result.died else f"{died} {imagined}" if died else imagined


def how_it_died(result: WhatIf) -> str:
    """What to know before any verdict on another format, or nothing."""
    was = _recorded_format(result)
    if result.sick is not None:
        return f"This {was} run went wrong at step {result.sick.step} as it would in any format: {result.sick.cause}."
    if result.broken_from is not None:
        return f"This {was} run did NOT SURVIVE as it was: its loss is not finite from step {result.broken_from} on."
    return "" if result.wrong is None else f"This {was} run went wrong as it was: {result.wrong.cause} in {result.wrong.culprit}."


def what_if_verdict(result: WhatIf) -> str:
    run = f"This {_recorded_format(result)} run"
    name = _upper(result.target)
    if result.own_format and result.survives is not None:
        died = "did NOT SURVIVE" if result.broken_from is not None and result.sick is None else "went wrong"  # as above
        return f"{run} SURVIVED in {name}." if result.survives else f"{run} {died} in {name}."
    if result.sick is not None and not result.reasons and not result.too_many_skips:
        return f"{run} stayed within {name} until then, and would have gone wrong there as well."
    if result.unknown and result.died:
        return f"{run} stayed within {name} until then; whether it would have gone on is not known."
    if result.unknown:
        return f"{run} fits into {name} as far as range goes; whether that would have mended it is not known."
    if result.survives is False:
        return f"{run} WOULD NOT SURVIVE in {name}, because"
    if result.survives is None:
        return f"{run} {'SURVIVED' if result.own_format else 'WOULD SURVIVE'} in {name} WITH LOSSES"
    if result.own_scale or result.target == BF16:
        return f"{run} WOULD SURVIVE in {name} as far as range goes: nothing on record leaves it."
    if result.starts_too_low:
        return f"{run} WOULD SURVIVE in {name} if its loss scale starts high enough, see below."
    return f"{run} WOULD SURVIVE in {name}: everything on record fits, gradients with the right loss scale."


def what_if_reasons(result: WhatIf) -> list[str]:
    out = [_reason(group, result) for group in result.reasons]
    if result.too_many_skips and result.path is not None:
        what = "this loss scale" if result.path.fixed else "any loss scale"
        out.insert(0, f"gradients overflow under {what}: {share(result.path.skip_rate)} of the steps would be skipped")
    if result.rounds_updates and not result.own_format:
        out.append(f"{_small_updates(result)}, and the weights have no FP32 copy: most would be rounded away")
    return out


def what_if_remarks(result: WhatIf, *, curves: bool = True) -> list[str]:
    """What else to know; `curves` draws the loss scale over time as text. Of a run that died as it was, no scale is praised."""
    scale = [] if (result.own_format or result.died) and result.survives is False else _scale_remarks(result, curves)
    return [*scale, *_format_remarks(result)]


def _reason(group: Sequence[Outcome], result: WhatIf) -> str:
    worst, many = group[0], len(group) > 1
    what = amount(len(group), _NOUNS[worst.kind], _PLURALS.get(worst.kind, ""))
    site = shorten(worst.site, MOST_NAME)
    others = f"; also {join_names([shorten(outcome.site, MOST_NAME) for outcome in group[1:]], 2)}" if many else ""
    reach = f"{site} reaches {short(worst.peak)} at step {worst.peak_step}"
    end = f"{_upper(result.target)} {'ends' if result.target.has_inf else 'saturates'} at {number(result.target.max)}"
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


def _scale_remarks(result: WhatIf, curves: bool) -> list[str]:
    path = result.path
    if path is None:
        return []
    skips = f"{share(path.skip_rate)} of the steps would be skipped"
    if path.fixed:
        return [f"loss scale 2**{path.best_bits} as given: {skips}"]
    low = "" if result.needed_bits is None else f", usable from 2**{result.needed_bits} on"
    out = [f"best loss scale: 2**{path.best_bits}{low}; {skips}"]
    if curves and len(set(path.limit_bits.tolist())) > 1:
        curve = sparkline(path.limit_bits.tolist(), 60)
        out += ["largest loss scale that fits, over time:", f"  {curve}"]
    if result.starts_too_low:
        start = max(path.best_bits - MARGIN_BITS, result.needed_bits or 0)
        out.append(
            f"GradScaler starts at 2**{START_BITS}, where gradients flush to zero here, and doubles only every 2000 steps: "
            f"use GradScaler(init_scale=2.0**{start})"
        )
    return out


def _format_remarks(result: WhatIf) -> list[str]:
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
    if result.own.bits < 32:
        low = result.own.torch_name
        stay = f", {amount(result.spared, 'output')} that stayed in FP32 left out" if result.spared else ""
        out.append(f"the run was recorded in {low}{stay}; what {low} had already lost is not on record")
    elif target == FP16:
        out.append("autocast keeps some outputs in FP32 (norms, softmax and losses on CUDA): such a culprit is spared there")
    if result.stride > 1:
        out.append(f"a long run: shares are of one in {result.stride} of its traced steps, magnitudes of all")
    small = result.update_ratio is not None and target.bits == 16 and result.update_ratio < target.unit_roundoff / 2
    if small and not result.rounds_updates:
        out.append(
            f"{_small_updates(result)}: with weights in {_upper(target)} and no FP32 copy of them, most would be rounded away"
        )
    return out


def _small_updates(result: WhatIf) -> str:
    largest, half_step = short(result.update_ratio), short(result.target.unit_roundoff / 2)
    return f"even the largest updates are only {largest} of their weights, less than half a rounding step ({half_step})"


def _after_what_if(result: WhatIf) -> list[str]:
    command = result.source.command
    out = [command("layer", result.outcomes[0].site)]
    if result.fixed_scale is not None:
        out.append(command("whatif", "--dtype", result.target.name))
    elif result.target == FP16 and not result.survives:
        out.append(command("whatif", "--dtype", "bf16"))
    return out


def _recorded_format(result: WhatIf) -> str:
    return _upper(result.own)


def _upper(target: Format) -> str:
    return target.name.upper().replace("_", " ")


def _outcome_table(result: WhatIf, limit: int | None) -> Table:
    columns = (
        Column("layer", elastic=True), Column("kind"), Column("verdict", says=True), Column("peak"),
        Column("flushed", show=share), Column("subnormal", show=share),
        Column("energy", "energy lost", show=share), Column("history", "over time"),
    )  # fmt: skip
    rows = []
    for one in result.outcomes:
        word = f"{one.why} {one.overflow_steps}/{len(one.steps)}" if one.why == "overflows" else one.why or "fits"
        curve = sparkline(one.history, 12, log=one.kind in FORWARD)
        rows.append([one.site, one.kind, word, one.peak, one.flushed, one.subnormal, one.flushed_energy, curve])
    styles = ["" if one.severity is None else STYLES[one.severity] for one in result.outcomes]
    most = limit or (OUTCOMES_SHOWN if result.reasons else OUTCOMES_SHOWN_IF_ALL_FIT)
    sick = sum(one.severity is not None for one in result.outcomes[most:])
    rest = f"tensors, {sick} of which do not fit" if sick else "tensors, all of which fit"
    return Table(columns, rows, most=most, rest=rest, styles=styles)


def _outcome_rows(outcomes: Sequence[Outcome]) -> Table:
    names = [name for name in vars(outcomes[0]) if name not in ("history", "steps")]
    rows = [[v.name if isinstance(v := getattr(one, name), Severity) else v for name in names] for one in outcomes]
    return Table(tuple(Column(name) for name in names), rows)


def _what_if_data(result: WhatIf) -> dict[str, Any]:
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
        "unknown": result.unknown,
        "loss_scale": scales,
        "layers": [vars(outcome) for outcome in result.outcomes],
    }
