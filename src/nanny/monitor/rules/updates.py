"""What the optimizer did: updates that round away, eps that is too small or too large, state that cannot move."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.finding import Severity
from ...core.formats import format_of
from ...core.numbers import share, short
from ...core.step import StepRecord, unchanged_share
from ...diagnose.history import RunHistory
from ..registry import Observation, rule


@rule("LOST_UPDATE", Severity.WARNING, cause="update_lost", needs="updates")
def lost_update(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """Most weights with a gradient were left bit-identical by the optimizer step.

    Why: weights kept in 16 bits move only by whole spacings; an update below half a spacing (0.2 % of it in bf16) is lost.
    """
    # in FP32 an update that rounds away is below 1e-7 of its weight: a tiny learning rate or convergence, not a loss of precision
    part = unchanged_share(step.updates)
    if step.skipped or part is None or part <= run.limits.unchanged_share_warn:
        return
    moving = [u for u in step.updates if u.may_be_lost]
    before = max(run.lost_updates, key=lambda u: u.unchanged, default=None)  # one fault is one finding, whose weight stays
    worst = next((u for u in moving if before and u.name == before.name), None) or max(moving, key=lambda u: u.unchanged)
    ordinary = all(o.rounds_to_nearest for o in step.optimizers)
    severity = Severity.ERROR if part > run.limits.unchanged_share_error else Severity.WARNING
    yield Observation(
        f"{share(part)} of the weights with a gradient did not change in this step; in `{worst.name}` ({worst.dtype}) "
        f"the mean update was {short(worst.update_rms)} on weights of {short(worst.weight_rms)}",
        worst.name,
        severity=severity if ordinary else Severity.INFO,
        value=part,
        limit=run.limits.unchanged_share_warn,
        evidence={"dtype": worst.dtype, "lr": worst.lr, "update_rms": worst.update_rms, "weight_rms": worst.weight_rms},
    )


@rule("EPS_UNDERFLOW", Severity.ERROR, cause="adam_eps_underflow_fp16", needs="optimizers")
def eps_underflow(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """The optimizer's eps is zero in the precision of its state.

    Why: 1e-8 is below the smallest fp16 value; where the second moment flushes to 0 too, the first step divides by zero.
    """
    for state in step.optimizers:
        dtype = state.state_dtype or state.param_dtype
        if state.eps is None or state.fused or dtype not in ("float16", "float8_e4m3fn", "float8_e5m2"):
            continue
        limit = format_of(dtype).flush_at
        if state.eps <= limit:
            yield Observation(
                f"{state.name} works with eps={state.eps:g} in {dtype}, where everything up to {limit:.2g} is 0",
                "optimizer.eps", value=state.eps, limit=limit, evidence={"dtype": dtype, "optimizer": state.name},
            )  # fmt: skip


@rule("EPS_DOMINATES", Severity.WARNING, cause="adam_eps_dominates", needs="optimizers")
def eps_dominates(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """The optimizer's eps is larger than the gradients it divides by.

    Why: the update is no longer normalised, it shrinks with the gradient; training is slower than the learning rate says.
    """
    for state in step.optimizers:
        ratio = state.eps_ratio
        if ratio is not None and ratio < run.limits.eps_dominates_warn and run.steps >= run.limits.baseline_steps:
            yield Observation(
                f"half of the values of sqrt(v) are below {ratio:.2g} times eps={state.eps:g}",
                "optimizer.eps",
                severity=Severity.ERROR if ratio < run.limits.eps_dominates_error else None,
                value=ratio,
                limit=run.limits.eps_dominates_warn,
                evidence={"optimizer": state.name},
            )


@rule("STATE_STAGNATION", Severity.WARNING, cause="ema_stagnation", needs="optimizers")
def state_stagnation(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """The optimizer's moving average decays more slowly than its precision can express.

    Why: v * beta2 rounds back to v, so the second moment never falls again and the steps stay too small.
    """
    for state in step.optimizers:
        limit = state.stalls_at
        if state.beta2 is None or limit is None:
            continue
        yield Observation(
            f"{state.name} keeps its averages in {state.state_dtype}; 1 - beta2 = {1 - state.beta2:.2g} is below its {limit:.2g}",
            "optimizer.state", value=1 - state.beta2, limit=limit, evidence={"optimizer": state.name, "dtype": state.state_dtype},
        )  # fmt: skip
