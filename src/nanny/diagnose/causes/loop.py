"""Mistakes of a loop that numbers show by themselves: each is proved by the rule of the same name."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.finding import Severity
from ..records import Diagnosis
from ..registry import CERTAIN, LIKELY, POSSIBLE, cause, less_sure
from ..signs import Signs


def by_finding(signs: Signs, code: str, *chain: str, confidence: float = LIKELY) -> Iterator[Diagnosis]:
    """What a rule has proved; a part that stands apart does not explain broken numbers."""
    found = signs.evidence.finding(code)
    if found is None:
        return
    sure = CERTAIN if found.severity is Severity.ERROR else confidence
    yield Diagnosis(
        culprit=found.site,
        confidence=sure if sure == CERTAIN or not signs.harmed else less_sure(sure),
        evidence=(f"step {found.step}: {found.message}",),
        chain=chain,
        step=found.step,
        where=found.where if found.file else "",
    )


@cause("step_changes_nothing", family="loop", precision=False)
def step_changes_nothing(signs: Signs) -> Iterator[Diagnosis]:
    """The optimizer steps and no weight of the model moves.

    Confirm: compare a parameter before and after optimizer.step(): torch.equal is True.
    """
    yield from by_finding(signs, "STEP_CHANGES_NOTHING", "the step moves nothing", "the loss only follows the batches")


@cause("in_no_optimizer", family="loop", precision=False)
def in_no_optimizer(signs: Signs) -> Iterator[Diagnosis]:
    """A part of the model gets gradients and belongs to no optimizer.

    Confirm: look for the parameter among optimizer.param_groups, by identity: it is in none.
    """
    yield from by_finding(signs, "IN_NO_OPTIMIZER", "gradients that nobody uses", "the part keeps its first weights")


@cause("trained_but_frozen", family="loop", precision=False)
def trained_but_frozen(signs: Signs) -> Iterator[Diagnosis]:
    """What was meant to be frozen moves.

    Confirm: compare the parameter, or the running statistics, before and after a few steps: they differ.
    """
    yield from by_finding(signs, "TRAINED_BUT_FROZEN", "frozen in name", "moved at every step", "the pretrained part wears away")


@cause("no_gradient_arrives", family="loop", precision=False)
def no_gradient_arrives(signs: Signs) -> Iterator[Diagnosis]:
    """A part that runs and is to be trained is cut off from the loss.

    Confirm: after loss.backward() the .grad of the parameter is None, or all zero.
    """
    chain = ("no path from the loss", "no gradient", "the part keeps its first weights")
    yield from by_finding(signs, "NO_GRADIENT_ARRIVES", *chain, confidence=POSSIBLE if signs.learns else LIKELY)


@cause("gradient_never_cleared", family="loop", precision=False)
def gradient_never_cleared(signs: Signs) -> Iterator[Diagnosis]:
    """Every backward pass adds to the gradients of all steps before.

    Confirm: at the start of a step .grad is not None and not zero.
    """
    chain = ("backward adds to old gradients", "updates grow from step to step", "loss and gradients explode")
    yield from by_finding(signs, "GRADIENT_NEVER_CLEARED", *chain)


@cause("step_without_backward", family="loop", precision=False)
def step_without_backward(signs: Signs) -> Iterator[Diagnosis]:
    """The optimizer steps on an old gradient, or on none.

    Confirm: count backward passes and optimizer steps: there are more steps.
    """
    yield from by_finding(signs, "STEP_WITHOUT_BACKWARD", "no new gradient", "the step does nothing, or the old one again")


@cause("backward_without_step", family="loop", precision=False)
def backward_without_step(signs: Signs) -> Iterator[Diagnosis]:
    """Gradients are cleared before an optimizer takes them.

    Confirm: count backward passes and optimizer steps: there are more backward passes, and no accumulation.
    """
    yield from by_finding(signs, "BACKWARD_WITHOUT_STEP", "gradients are cleared", "most batches teach nothing")


@cause("gradient_gone_for_one_step", family="loop", precision=False)
def gradient_gone_for_one_step(signs: Signs) -> Iterator[Diagnosis]:
    """A gradient that was there at every step is exactly 0 at one.

    Confirm: look at the batch of this step, and at what the ranks sent.
    """
    chain = ("an input or a message is lost", "a gradient of exactly 0", "one step of decay and momentum alone")
    yield from by_finding(signs, "GRADIENT_GONE_FOR_ONE_STEP", *chain, confidence=POSSIBLE)


@cause("same_batch_again", family="loop", precision=False)
def same_batch_again(signs: Signs) -> Iterator[Diagnosis]:
    """The loader gives the same batch at every step.

    Confirm: print batch[0].sum() at a few steps: it is the same number.
    """
    yield from by_finding(signs, "SAME_BATCH_AGAIN", "one batch at every step", "it is learned by heart, nothing else is")


@cause("mode_mismatch", family="loop", precision=False)
def mode_mismatch(signs: Signs) -> Iterator[Diagnosis]:
    """Trained in evaluation mode, or evaluated in train mode.

    Confirm: print model.training right before the forward pass.
    """
    chain = ("the wrong mode", "dropout and norms compute something else", "training and evaluation do not speak of one model")
    yield from by_finding(signs, "MODE_MISMATCH", *chain)


@cause("autocast_not_applied", family="loop", precision=False)
def autocast_not_applied(signs: Signs) -> Iterator[Diagnosis]:
    """Autocast is entered and the model runs outside it.

    Confirm: print the dtype of a linear layer's output: it is float32.
    """
    yield from by_finding(signs, "AUTOCAST_NOT_APPLIED", "the layers run outside autocast", "FP32 in speed and memory")
