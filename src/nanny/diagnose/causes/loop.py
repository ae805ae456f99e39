"""Mistakes of a loop that numbers show by themselves: each is proved by the rule of the same name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ...core.finding import Severity
from ..records import Diagnosis
from ..registry import CERTAIN, LIKELY, POSSIBLE, cause, less_sure
from ..signs import Signs

_CHAINS = {
    "step_changes_nothing": ("the step moves nothing", "the loss only follows the batches"),
    "in_no_optimizer": ("gradients that nobody uses", "the part keeps its first weights"),
    "trained_but_frozen": ("frozen in name", "moved at every step", "the pretrained part wears away"),
    "no_gradient_arrives": ("no path from the loss", "no gradient", "the part keeps its first weights"),
    "gradient_never_cleared": (
        *("backward adds to old gradients", "updates grow from step to step", "loss and gradients explode"),
    ),
    "step_without_backward": ("no new gradient", "the step does nothing, or the old one again"),
    "backward_without_step": ("gradients are cleared", "most batches teach nothing"),
    "gradient_gone_for_one_step": (
        *("an input or a message is lost", "a gradient of exactly 0", "one step of decay and momentum alone"),
    ),
    "same_batch_again": ("one batch at every step", "it is learned by heart, nothing else is"),
    "mode_mismatch": (
        *("the wrong mode", "dropout and norms compute something else", "training and evaluation do not speak of one model"),
    ),
    "autocast_not_applied": ("the layers run outside autocast", "FP32 in speed and memory"),
}


def _by_rule(signs: Signs, name: str) -> Iterator[Diagnosis]:
    """What a rule has proved; a part that stands apart does not explain broken numbers."""
    found = signs.evidence.finding(name.upper())
    if found is None or found.severity is Severity.INFO:
        return
    stands_apart = name == "gradient_gone_for_one_step" or (name == "no_gradient_arrives" and signs.learns)
    sure = CERTAIN if found.severity is Severity.ERROR else POSSIBLE if stands_apart else LIKELY
    yield Diagnosis(
        culprit=found.site,
        confidence=sure if sure == CERTAIN or not signs.harmed else less_sure(sure),
        evidence=(f"step {found.step}: {found.message}",),
        chain=_CHAINS[name],
        step=found.step,
        where=found.where if found.file else "",
    )


for _name in _CHAINS:
    cause(_name, family="loop", precision=False)(partial(_by_rule, name=_name))
