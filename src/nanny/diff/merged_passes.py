"""From the passes over several batches to one report: every call and gradient with the numbers of its worst batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from .paired_run import Pass
from .records import CallDiff, DiffReport, Failure, Flip, GradDiff, OpUse
from .settings import Settings


def merged_report(
    model: nn.Module, settings: Settings, passes: Sequence[Pass], failure: Failure | None, notes: Sequence[str]
) -> DiffReport:
    calls = _worst_calls([p.calls for p in passes])
    parents = {site.rpartition(".")[0] for site in {c.site for c in calls} if site}
    leaves = [c for c in calls if c.site and c.site not in parents]
    return DiffReport(
        model=type(model).__name__,
        target=settings.target.name,
        reference=settings.reference,
        policy=settings.policy,
        device=settings.device,
        training=model.training,
        batches=len(passes),
        calls=calls,
        gradients=_worst_gradients([p.gradients for p in passes]),
        activation_gradients=_worst_gradients([p.activation_gradients for p in passes]),
        total=max((p.total for p in passes if p.total), key=lambda t: t.rel_l2, default=None),
        loss=passes[-1].loss if passes else None,
        reference_loss=passes[-1].reference_loss if passes else None,
        loss_own=passes[-1].loss_own if passes else None,
        floor=settings.target.unit_roundoff * max(len(leaves), 1) ** 0.5,
        flips=_flips(passes),
        operations=tuple(OpUse(*key, count) for key, count in passes[0].operations.items()) if passes else (),
        flops=dict(passes[0].flops) if passes else {},
        integers=tuple({key: lost for p in passes for key, lost in p.integers.items()}.values()),
        mixes=tuple({site: mix for p in passes for site, mix in p.mixes.items()}.values()),
        failure=failure,
        partial=any(p.interrupted for p in passes),
        reseeds={why: n for p in passes for why, n in p.reseeds.items()},
        notes=tuple(dict.fromkeys([*notes, *(note for p in passes for note in p.notes)])),
    )


def _worst_calls(batches: Sequence[Sequence[CallDiff]]) -> tuple[CallDiff, ...]:
    """Each call with the numbers of its worst batch, and the mean of its relative error over all."""
    groups: dict[tuple[str, int], list[CallDiff]] = {}
    for number, calls in enumerate(batches):
        for call in calls:
            groups.setdefault((call.site, call.call), []).append(replace(call, batch=number))
    worst = []
    for group in groups.values():
        one = max(group, key=lambda c: (c.error.spoiled > 0, c.error.worst))
        worst.append(replace(one, mean_rel_l2=sum(c.error.rel_l2 for c in group) / len(group)))
    return tuple(sorted(worst, key=lambda c: c.order))


def _worst_gradients(batches: Sequence[Sequence[GradDiff]]) -> tuple[GradDiff, ...]:
    worst: dict[tuple[str, int], GradDiff] = {}
    for gradients in batches:
        for one in gradients:
            held = worst.get((one.name, one.call))
            if held is None or (one.error.spoiled > 0, one.error.rel_l2) > (held.error.spoiled > 0, held.error.rel_l2):
                worst[(one.name, one.call)] = one
    return tuple(sorted(worst.values(), key=lambda g: g.order))


def _flips(passes: Sequence[Pass]) -> tuple[Flip, ...]:
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for one in passes:
        for key, (flipped, count) in one.flips.items():
            before = sums.get(key, (0, 0))
            sums[key] = (before[0] + flipped, before[1] + count)
    return tuple(Flip(site, op, flipped, count) for (site, op), (flipped, count) in sums.items() if flipped)
