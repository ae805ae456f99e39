"""Every threshold of the nanny, once, with its source.

`Limits()` holds the numbers in force; `dataclasses.replace(Limits(), grad_zscore=8)` changes one. Each names the section of
`docs/numerics.md` that derives or measures it and says why it is what it is; a number that is often quoted instead stands beside
it. `docs/limits.md` is generated from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

PAGE = "docs/numerics.md"


def _limit(value: float, section: str, why: str, *, quoted: str = "") -> Any:
    return field(default=value, metadata={"source": f"{PAGE}#{section}", "why": why, "quoted": quoted})


@dataclass(frozen=True)
class Limits:
    """Numbers that separate healthy from sick. Shares are fractions of 1, headroom is in bits (binary orders)."""

    # one tensor in a target format
    flush_energy_warn: float = _limit(
        0.01, "energy", "small elements carry no energy: of a log-normal tensor 34 % flush and hold 5e-10 of it",
        quoted="1 % of the elements below the smallest value",
    )  # fmt: skip
    flush_energy_error: float = _limit(
        0.10, "energy", "judged by energy, not by count", quoted="10 % of the elements below the smallest value"
    )
    subnormal_energy_warn: float = _limit(0.10, "energy", "the relative error of subnormals grows to 100 % towards zero")
    overflow_share_error: float = _limit(0.0, "formats", "one infinity is enough to make a NaN")
    headroom_warn_bits: float = _limit(
        1.0, "headroom", "one doubling reaches infinity", quoted="60000, which leaves a factor of 1.09 (0.13 bits)"
    )
    headroom_info_bits: float = _limit(3.0, "headroom", "a factor of 8 between two looks is common while a run warms up")
    rel_l2_warn_roundoffs: float = _limit(
        25.0, "normal-error", "10 % in bf16, 1.2 % in fp16; 24 healthy residual blocks make 2.4",
        quoted="element-wise relative error above 1 %, which 15 % of the elements of an ordinary bf16 Linear exceed",
    )  # fmt: skip
    rel_l2_error: float = _limit(
        1.0, "normal-error", "the error is as large as the tensor", quoted="element-wise relative error above 10 %"
    )
    rel_mark_warn: float = _limit(0.01, "normal-error", "shown as a mark; a rule only on request", quoted="1 %")
    rel_mark_error: float = _limit(0.10, "normal-error", "shown as a mark; a rule only on request", quoted="10 %")
    centred_floor: float = _limit(
        1e-4, "common-offset", "with a smaller varying part the centred error divides by rounding noise"
    )
    spacing_ratio_warn: float = _limit(0.1, "common-offset", "spacing over variation: rounding alone is 3 % of what varies")
    spacing_ratio_error: float = _limit(1.0, "common-offset", "what varies is below one spacing: gone")
    spacing_ratio_roundoffs: float = _limit(
        8.0, "common-offset", "zero-mean data has 1 to 2; keeps the coarse fp8 formats from looking sick by themselves"
    )
    source_noise_roundoffs: float = _limit(
        64.0, "common-offset", "a choice: less variation may be the source's own rounding of a constant"
    )
    integers_distinct_warn: float = _limit(
        8, "whole-numbers", "a choice: a few whole numbers may be so by chance, more are ids or counts"
    )
    positions_lost_warn: float = _limit(
        0.05, "common-offset", "a choice: one constant channel among many is healthy, one column in twenty is data"
    )
    imbalance_notable_roundoffs: float = _limit(1 / 16, "sums", "from 1/(16u) on, a few per cent of the small part are gone")
    swallowed_mass_warn: float = _limit(0.01, "sums", "a choice: 1 % of the sum of magnitudes lost in an accumulator")
    swallowed_mass_error: float = _limit(0.10, "sums", "a choice: 10 % lost")
    reduction_error_warn: float = _limit(
        0.01, "sums", "library reductions accumulate in FP32 and round once; only a measured error counts",
        quoted="every sum or mean is a risk",
    )  # fmt: skip
    reduction_slack: float = _limit(4.0, "sums", "the condition number times the error of the cast explains this much with room")
    one_sign_condition: float = _limit(2.0, "sums", "sum|x| / |sum x| below this, the sum is no difference of large parts")
    reduction_error_error: float = _limit(0.10, "sums", "a choice: a tenth of the result is wrong")

    # gradients
    grad_rail_high: float = _limit(
        1e4, "own-history", "a norm scales with the loss; only a rail until the run has a history of its own",
        quoted="a norm above 100 or 1000",
    )  # fmt: skip
    grad_rail_low: float = _limit(
        1e-8, "own-history", "a rail until there is a history, and only for the whole model",
        quoted="a norm below 1e-3 or 1e-6, which healthy runs have",
    )  # fmt: skip
    grad_none: float = _limit(1e-10, "own-history", "a choice: a layer whose largest gradient is below has none", quoted="1e-10")
    grad_zscore: float = _limit(6.0, "own-history", "robust z of the log norm; by chance once in 2000 steps, so not alone")
    grad_ratio: float = _limit(10.0, "own-history", "and ten times the median: both must hold")
    grad_vanish_ratio: float = _limit(1e-3, "own-history", "a choice: three orders below its own median, for several steps")
    baseline_steps: float = _limit(20, "own-history", "with 5 steps of history 2.4 % of healthy steps pass z = 6")
    history_steps: float = _limit(
        200, "own-history", "long enough that no healthy step passes z = 6, short enough to follow a run"
    )
    vanish_steps: float = _limit(5, "own-history", "a choice: one small batch is not a trend")
    dead_steps: float = _limit(
        3, "own-history", "frozen, unused, zero-initialised and sparse parameters have exact zeros in health",
        quoted="a gradient of 0 at any step",
    )  # fmt: skip

    underflow_sites: float = _limit(
        0.5, "loss-scaling", "a choice: some branches have small gradients in health, most of a model has not"
    )

    # loss scale
    scale_skips_error: float = _limit(
        5, "loss-scaling", "counts only after the first good step: a healthy start from 2**24 skips 6",
        quoted="5 decreases in a row at any time",
    )  # fmt: skip
    scale_searches: float = _limit(2, "loss-scaling", "a choice: one may be a restart by hand while the first search went on")
    scale_low_warn: float = _limit(
        128, "loss-scaling", "where steps once passed at a higher one; which scale is healthy depends on the gradients",
        quoted="128; 1024",
    )  # fmt: skip
    scale_sunk: float = _limit(0.01, "loss-scaling", "a choice: a hundredth of the scale at which steps first passed")
    scale_floor: float = _limit(
        1.0, "loss-scaling", "GradScaler halves for ever; below 1 the gradients themselves do not fit",
        quoted="1 as the value at which it stops",
    )  # fmt: skip
    scale_collapse_skips: float = _limit(3, "loss-scaling", "a choice: a scale set below 1 on purpose may skip once or twice")
    skip_window: float = _limit(200, "loss-scaling", "a choice: 1 % of it is 2 skips")
    skip_rate_warn: float = _limit(0.01, "loss-scaling", "the usual growth every 2000 steps costs 0.05 %", quoted="1 %")
    skip_rate_error: float = _limit(0.10, "loss-scaling", "a choice: one step in ten is not taken")
    scale_stuck: float = _limit(0.9, "loss-scaling", "a choice: so much of it left at a skip, seven skips do not halve it")
    schedule_skips: float = _limit(16, "loss-scaling", "a start from 2**24 skips 6 steps until it has found its scale")

    # loss
    loss_zscore: float = _limit(8.0, "own-history", "a choice: a loss is noisier than a gradient norm")
    loss_ratio: float = _limit(3.0, "own-history", "a choice: and three times the median; both must hold")
    loss_learnt: float = _limit(0.8, "own-history", "a choice: a new task falls so far within the steps that make a trend")
    loss_high_steps: float = _limit(3, "own-history", "a choice: one bad batch is not a trend")
    plateau_steps: float = _limit(50, "updates", "a choice: a bit-identical loss that long, with gradients, means nothing moves")
    converged: float = _limit(1e-2, "own-history", "a choice: below this share of its beginning is convergence, not trouble")
    explosion_steps: float = _limit(3, "own-history", "a choice: one outlier batch is not an explosion")
    explosion_ratio: float = _limit(100.0, "own-history", "a choice: two orders above its history needs no second step")
    activation_rail: float = _limit(
        1e3, "own-history", "a choice: outputs this large are no matter of how the loss is normalised"
    )
    update_rail: float = _limit(1.0, "updates", "an update as large as the weights throws them away")

    # a model beside its FP32 self
    diff_centred_warn: float = _limit(
        0.25, "common-offset", "a healthy pooled CNN, whose outputs vary little, reaches 7 %; an offset of 1000 gives 93 %"
    )
    diff_grad_warn: float = _limit(
        0.05,
        "gradients-beside-fp32",
        "healthy: below 1 %, with ReLU flips 3 %; where flips explain it, the measured floor decides",
    )
    diff_grad_error: float = _limit(0.5, "gradients-beside-fp32", "a choice: a gradient that is half noise")
    diff_flip_warn: float = _limit(0.01, "decisions", "a healthy bf16 router over 64 experts flips 0.7 %")
    diff_culprit_share: float = _limit(
        0.25,
        "gradients-beside-fp32",
        "a choice: the first layer with a quarter of the largest own error; later ones suffer from it",
    )
    diff_floor_times: float = _limit(
        2.0, "gradients-beside-fp32", "FP32 with each layer's output rounded once makes half of it: no operation is to blame"
    )
    diff_energy_share: float = _limit(
        0.01, "gradients-beside-fp32", "a parameter with less of the energy moves the gradient by less than 10 %"
    )

    # two runs beside each other
    part_window: float = _limit(25, "own-history", "steps over which a gap must keep its sign and size; fewer in short runs")
    part_zscore: float = _limit(5.0, "own-history", "standard errors of the median gap: 1 in 100,000 windows of pure noise")
    part_loss_roundoffs: float = _limit(
        5.0, "normal-error", "0.24 % in fp16, 2 % in bf16; DeepSeek-V3 reports a gap below 0.25 % to bf16"
    )
    part_norm: float = _limit(0.10, "normal-error", "25 roundoffs of bf16; less is common among healthy runs of any format")
    part_loss_range: float = _limit(0.01, "own-history", "a choice: less than 1 % of what the loss has fallen is not a worse run")

    # a run imagined in another format
    lost_gradient_share: float = _limit(
        0.01, "energy", "a choice: share of parameters left without gradient; fewer is a loss, not the end"
    )

    # one operation beside its reference
    op_error_roundoffs: float = _limit(
        4.0, "one-operation", "a correctly rounded result is off by 1; per element, of its magnitude plus the tensor's rms",
        quoted="atol = rtol = 0.001 in every dtype; fp16 rounds to 0.0005, bf16 to 0.004, fp32 to 6e-8",
    )  # fmt: skip
    op_l2_roundoffs: float = _limit(2.0, "one-operation", "rounding once gives 0.43 in relative L2; a bias of 1 % in bf16 is 2.6")
    op_fp32_slack: float = _limit(
        32.0, "one-operation", "fp32 kernels round every term, low-precision ones only their result: 15 in a matmul over 256"
    )
    op_conditioning: float = _limit(
        6.0,
        "one-operation",
        "a choice: times what one roundoff in every input does to the result",
    )
    op_excused_low: float = _limit(
        0.25, "one-operation", "sums kept in 16 bits: 1 % off over 512 rows, 87 % over 8192, and that is an error"
    )

    # updates and optimizer state
    unchanged_share_warn: float = _limit(0.5, "updates", "more than half the elements left bit-identical")
    unchanged_share_error: float = _limit(0.9, "updates", "next to nothing is learned")
    eps_dominates_warn: float = _limit(1.0, "adam", "median sqrt(v) / eps: below 1 a step is less than half as long as meant")
    eps_dominates_error: float = _limit(0.1, "adam", "below 0.1 it is less than a tenth")

    # one examined step
    damage_consequence: float = _limit(
        0.10, "gradients-beside-fp32", "healthy gradients stay below 1 %, with ReLU flips 3 %; room for smaller nets"
    )
    damage_certain: float = _limit(0.03, "gradients-beside-fp32", "enough where the mechanism itself is proved at the operation")
    damage_kept: float = _limit(0.5, "updates", "less than half of an update or addend arrives")
    damage_average: float = _limit(16.0, "updates", "a choice: an average over so few steps stays within 6 % in bf16")
    damage_flips: float = _limit(0.05, "decisions", "near-ties of a healthy router flip for 0.2 to 0.7 % of the tokens")
    damage_ties: float = _limit(0.2, "decisions", "healthy scores tie in 0.1 to 1.3 % of the choices")
    target_spacing: float = _limit(1.0, "formats", "targets that vary by a spacing owe a twelfth of their variance to rounding")
    stored_angle: float = _limit(1.0, "whole-numbers", "a choice: radians from one number of the format to the next")
    stored_unexplained: float = _limit(0.25, "whole-numbers", "a choice: of what targets vary by, at equal inputs")
    stored_column: float = _limit(1.5, "formats", "spacings: rounding is a fifth of what varies")
    stored_columns: float = _limit(0.25, "formats", "a choice: of the columns that vary; a few pixels may be all but constant")
    damage_last_bit: float = _limit(0.25, "formats", "numbers that a format has rounded use its last bit half of the time")
    damage_made: float = _limit(2.0, "normal-error", "an error twice what goes in was made here; healthy ones grow slowly")
    damage_fades: float = _limit(5.0, "normal-error", "a choice: blame is kept down to this part of the level at which it begins")
    damage_bits_lost: float = _limit(8.0, "cancellation", "a difference 8 times smaller than its operands has lost three bits")
    damage_cancelled: float = _limit(8.0, "cancellation", "a difference of 8 roundoffs is 7 % rounding, up to 25 %")
    damage_cancelled_error: float = _limit(0.075, "cancellation", "what is measured of a difference of 8 roundoffs")
    damage_branch: float = _limit(16.0, "sums", "an addend below 16u of the other: a few per cent of it are gone")
    damage_repeats: float = _limit(8, "sums", "a choice: a sum that a loop adds up, not a single addition")
    damage_phase: float = _limit(0.1, "whole-numbers", "radians: sine and cosine are off by up to 0.1")
    damage_entropy: float = _limit(0.1, "attention", "scores of std 10 over 256 keys have 0.08")
    damage_bias: float = _limit(0.5, "attention", "mean error over its spread; 0.007 for 10,000 honest roundings")
    damage_update: float = _limit(8.0, "adam", "a choice: times an update of FP32, or the weights themselves")
    damage_decay: float = _limit(9e-4, "updates", "a choice: a decay that takes more than a thousand steps is not missed soon")

    # diagnosis
    surprise_noted: float = _limit(3.0, "adam", "rms of g / sqrt(v); if it lasts, steps become 2.6 times as long as lr")
    surprise_spike: float = _limit(5.0, "adam", "steps 3.7 times as long as lr; counts together with a loss that rises behind it")
    dead_units_warn: float = _limit(0.8, "depth", "a choice: four of five units never on, in a run that does not learn")
    dead_units_error: float = _limit(0.98, "depth", "a layer that is off; nothing before it gets a gradient")
    lost_gradient_elements: float = _limit(
        0.1, "energy", "a choice: a tenth of the weights without their gradient is a fault of the run"
    )
    ratio_gap: float = _limit(1e-4, "decisions", "on unchanged weights a ratio is 1; FP32 gives 1e-6, one code path exactly 1")
    trend_points: float = _limit(5, "own-history", "1.4 % of 5 points of noise pass the next limit; fewer are chance")
    trend_fit: float = _limit(0.9, "own-history", "share of the variation that steady growth explains")
    rounding_bias: float = _limit(0.5, "attention", "mean error over its standard deviation, persistently")
    growth_each: float = _limit(1.15, "depth", "per layer or time step; a healthy residual stream grows by 1 to 2 %")
    growth_whole: float = _limit(1e3, "depth", "1.15 fifty times over")
    attention_entropy: float = _limit(0.05, "attention", "normalised entropy; scores of std 20 over 256 keys have 0.01")
    attention_logit: float = _limit(50.0, "attention", "the largest of 256 scores of std 20 is 56")
    decay_missing: float = _limit(
        0.02, "updates", "a choice: weights that should be 2 % smaller by now; less is nobody's trouble"
    )
    fade_layers: float = _limit(6, "depth", "fewer layers cannot fade, they differ")
    fade_ratio: float = _limit(
        1e-4, "depth", "rms of the first third over that of the last; 0.2 with ReLU, 4e-9 with 12 sigmoids"
    )
    biases_alone: float = _limit(
        1e-5, "depth", "a choice: gradient of the median matrix over that of all vectors; 1e-3 in a small BART as it begins"
    )
    spent_rate: float = _limit(0.02, "own-history", "a choice: of its highest; a cosine is below that for its last 9 % only")
    spent_share: float = _limit(0.1, "own-history", "a choice: of the run, in which a schedule spent its whole rate")
    spent_steps: int = _limit(50, "own-history", "a choice: fewer steps are a trial, whatever the schedule does")
    thrown_weights: float = _limit(2.0, "own-history", "a choice: the norm of all weights doubles, and nothing is learned")
    thrown_loss: float = _limit(2.0, "own-history", "a choice: times its start, to where the first updates threw it")
    thrown_update: float = _limit(
        0.1, "own-history", "of a tensor at step 16 or later; a bias that began at 0 moves by 0.06 there"
    )
    runaway_loss: float = _limit(10.0, "own-history", "a choice: ten times where it began, and staying there, is no bad batch")
    runaway_grad: float = _limit(100.0, "own-history", "as explosion_ratio, from the first steps on")
    runaway_weights: float = _limit(
        1.5, "own-history", "a choice: steps too long carry the weights away; a loss that grows by its data or weighting does not"
    )
    outlier_jump: float = _limit(1e3, "own-history", "a choice: times all losses lately, in one step behind an update as usual")
    outlier_slows: float = _limit(1e-2, "own-history", "a choice: updates a hundredth as long, for as long as Adam remembers")

    policy_ratio_warn: float = _limit(
        0.01, "decisions", "median |ratio - 1| of a sequence; bf16 against FP32 gives 0.003 at 32 tokens"
    )
    policy_ratio_error: float = _limit(0.2, "decisions", "PPO's usual clip range: the mismatch alone clips")

    # loops
    still_looks: float = _limit(3, "loops", "a choice: steps that moved nothing; the first may be of a warm-up")
    still_steps: float = _limit(10, "loops", "with a learning rate of 0: a warm-up from 0 has one such step")
    still_rising: float = _limit(64, "loops", "a rising rate: a warm-up moves FP32 weights within a few steps of it")
    still_again: float = _limit(16, "loops", "a choice: steps in a row that move nothing, after steps that did")
    still_tail: float = _limit(0.25, "loops", "of the steps before: a decay to 0 may end on it, for the last of five epochs")
    still_gradient: float = _limit(1e-7, "loops", "rms; the rounding noise of a flat loss is 1e-9")
    unowned_steps: float = _limit(3, "loops", "a choice: a gradient at three steps, and bits that stay")
    uncleared_steps: float = _limit(2, "loops", "a choice: once may be a step that is made to try")
    no_gradient_steps: float = _limit(10, "loops", "a zero-initialised gate passes none at one or two steps")
    idle_steps: float = _limit(128, "loops", "a choice: a branch that is not called may be called later")
    lost_steps: float = _limit(6, "loops", "a choice: backward passes for nothing, and half of all")
    lost_windows: float = _limit(3, "loops", "a choice: times that all gradients were cleared before any step at all")
    never_passes: float = _limit(256, "loops", "a choice: accumulation over more, before the first step, is unheard of")
    never_at_end: float = _limit(16, "loops", "a choice: so many backward passes, and the run ends, or others step, without one")
    stale_steps: float = _limit(3, "loops", "a choice: one step without a gradient is an odd batch")
    mode_steps: float = _limit(3, "loops", "a choice: three trained steps in evaluation mode")
    same_batches: float = _limit(8, "loops", "by chance 6e-5, for a data set of four different samples")
    same_draws: float = _limit(15, "loops", "a choice: who draws by hand may try a loop on one batch first; longer than a trial")
    gone_history: float = _limit(10, "loops", "a choice: steps with a gradient before the one without")
    gone_loss: float = _limit(1e-3, "loops", "of its median: a loss that is nearly 0 may have no gradient")
    gone_small: float = _limit(0.5, "loops", "of its median: a loss that falls to 0 by itself is smaller before")

    # static checker
    init_scale_low: float = _limit(8.0, "loss-scaling", "saves only gradients within 3 bits of the point where they become 0")
    init_scale_high: float = _limit(2.0**24, "loss-scaling", "a healthy start from 2**24 skips 6 steps; above is waste")
    fixed_scale_low: float = _limit(64.0, "loss-scaling", "a choice: a smaller factor may be the weight of one loss among others")
    fixed_scale_high: float = _limit(2.0**17, "loss-scaling", "a fixed scale: above it a gradient of 0.5 overflows fp16")
    growth_factor_high: float = _limit(
        8.0, "loss-scaling", "a choice: three doublings at once leave the working range of the scale"
    )
    backoff_factor_low: float = _limit(0.05, "loss-scaling", "a choice: one overflow costs 4.3 doublings")
    backoff_factor_high: float = _limit(0.95, "loss-scaling", "a choice: ten overflows take 40 % off the scale")
    growth_interval_low: float = _limit(20, "loss-scaling", "each growth may cost a skipped step: at most 5 % of the steps")
    growth_interval_high: float = _limit(1_000_000, "loss-scaling", "no growth within a common run")
    scale_power_high: float = _limit(
        32, "loss-scaling", "DeepSpeed's initial_scale_power is an exponent; above 32 it is a scale by mistake"
    )


def describe() -> list[dict[str, Any]]:
    """Name, value, source, why, and the number that is often quoted instead; for the docs."""
    return [{"name": f.name, "value": f.default, **f.metadata} for f in fields(Limits)]
