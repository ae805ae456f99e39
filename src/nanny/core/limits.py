"""Every threshold of the nanny, once, with its source.

`Limits()` holds the numbers in force; `dataclasses.replace(Limits(), grad_zscore=8)` changes one. Where a source document
("seed") named another number, it is kept beside ours with the reason for the change; `docs/limits.md` is generated from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


def _limit(value: float, source: str, *, seed: str = "", why: str = "") -> Any:
    return field(default=value, metadata={"source": source, "seed": seed, "why": why})


@dataclass(frozen=True)
class Limits:
    """Numbers that separate healthy from sick. Shares are fractions of 1, headroom is in bits (binary orders)."""

    # one tensor in a target format
    flush_energy_warn: float = _limit(
        0.01, "NUMERICS 4.2", seed="1 % of the elements below the smallest value: warning",
        why="small elements carry no energy: on a log-normal tensor 34 % flush and hold 3.5e-10 of the energy",
    )  # fmt: skip
    flush_energy_error: float = _limit(
        0.10, "NUMERICS 4.2", seed="10 % of the elements below the smallest value: error",
        why="judged by energy, not by count",
    )  # fmt: skip
    fp16_smallest: float = _limit(
        2.0**-25, "measured", seed="5.96e-8 as the smallest FP16 value",
        why="that is the smallest subnormal; magnitudes down to 2.98e-8 still round up to it, at or below they become 0",
    )  # fmt: skip
    bf16_smallest: float = _limit(
        2.0**-134, "measured", seed="1.17e-38 (and 1.4e-45 in a table) as the smallest BF16 value",
        why="1.18e-38 is the smallest normal, 9.18e-41 the smallest subnormal; 1.4e-45 belongs to FP32",
    )  # fmt: skip
    subnormal_energy_warn: float = _limit(0.10, "NUMERICS 4.2: relative error in the subnormal zone grows to 100 %")
    overflow_share_error: float = _limit(0.0, "one infinity is enough to make a NaN")
    headroom_warn_bits: float = _limit(
        1.0, "MECHANISMS, rules worth shipping: below 3 bits warn, below 1 severe",
        seed="60000 for FP16 (0.13 bits of headroom)",
        why="a doubling reaches infinity; 60000 leaves a factor of 1.09",
    )  # fmt: skip
    headroom_info_bits: float = _limit(3.0, "MECHANISMS, rules worth shipping")
    near_overflow: float = _limit(60000.0, "seed 000, 3.3; seed 003, 1.1", seed="60000")
    rel_l2_warn_roundoffs: float = _limit(
        25.0, "NUMERICS 4.3: 10 % in bf16, 1.2 % in fp16", seed="element-wise relative error 1 %: warning",
        why="15 % of the elements of an ordinary bf16 Linear exceed 1 % (values near 0); judge the whole tensor",
    )  # fmt: skip
    rel_l2_error: float = _limit(
        1.0, "NUMERICS 4.3", seed="element-wise relative error 10 %: error", why="as above",
    )  # fmt: skip
    rel_mark_warn: float = _limit(0.01, "seed 000, 1", seed="1 %", why="shown as a mark; a rule only on request")
    rel_mark_error: float = _limit(0.10, "seed 000, 1", seed="10 %", why="shown as a mark; a rule only on request")
    centred_floor: float = _limit(1e-4, "NUMERICS 4.3: the centred error needs a varying part above this share")
    spacing_ratio_warn: float = _limit(0.1, "NUMERICS 4.3: spacing over variation, the format cannot express it")
    spacing_ratio_error: float = _limit(1.0, "derived: variation below one spacing is gone")
    spacing_ratio_roundoffs: float = _limit(
        8.0, "derived: zero-mean data has 1 to 2; keeps the coarse fp8 formats from looking sick by themselves"
    )
    source_noise_roundoffs: float = _limit(64.0, "derived: less variation may be the source's own rounding of a constant")
    integers_distinct_warn: float = _limit(8, "derived: a few whole numbers may be so by chance, more are ids or counts")
    positions_lost_warn: float = _limit(
        0.05, "derived: one constant channel among many is how healthy networks look, one column in twenty is data"
    )
    imbalance_total_roundoffs: float = _limit(
        1.0, "NUMERICS 4.4: ratio of contributions above 1/u, a typical channel is absorbed whole",
        seed="max/min > 1e4 per dimension",
        why="a Gaussian tensor of 4096 elements has 1.6e4; what matters is rms per index against 1/u, and only in a reduction",
    )  # fmt: skip
    imbalance_notable_roundoffs: float = _limit(1 / 16, "NUMERICS 4.4: noticeable from 1/(16u)")
    ratio_mark: float = _limit(1e4, "seed 000, 1 and 4.2; seed 003, 2.2", seed="1e4", why="shown as a number, not a rule")
    swallowed_mass_warn: float = _limit(0.01, "derived: 1 % of the sum of magnitudes lost in an accumulator")
    swallowed_mass_error: float = _limit(0.10, "derived: 10 % lost")
    reduction_error_warn: float = _limit(
        0.01, "seed 000, 1: 1 %", seed="sum/mean: medium risk always",
        why="library reductions accumulate in FP32 and round once (NUMERICS fact 3); only a measured error counts",
    )  # fmt: skip
    reduction_slack: float = _limit(4.0, "derived: rounding of the terms explains condition number times the cast error")
    one_sign_condition: float = _limit(2.0, "derived: sum|x|/|sum x| below this, the sum is no difference of large parts")
    reduction_error_error: float = _limit(0.10, "seed 000, 1: 10 %")

    # gradients
    grad_rail_high: float = _limit(
        1e4, "seed 001, table of scenarios: gradient > 1e4", seed="norm > 100 warning, > 1000 about to crash",
        why="a norm scales with the loss normalisation; only a rail until the run has a history of its own",
    )  # fmt: skip
    grad_rail_low: float = _limit(
        1e-8, "seed 001, table of scenarios: gradient < 1e-8", seed="norm < 1e-6 severe, < 0.01 light, < 1e-3 vanished",
        why="healthy nets have norms of 1e-4; only a rail until there is a history, and only for the whole model",
    )  # fmt: skip
    grad_none: float = _limit(1e-10, "seed 003, 2.1: absmax below this is no gradient", seed="1e-10")
    grad_zscore: float = _limit(6.0, "NUMERICS 2, row 9: robust z of the log norm")
    grad_ratio: float = _limit(10.0, "Megatron: 10 times its own history; both must hold")
    grad_vanish_ratio: float = _limit(1e-3, "derived: three orders below its own median, for several steps")
    baseline_steps: float = _limit(20, "fewer steps give no median/MAD worth the name")
    history_steps: float = _limit(200, "MECHANISMS: median/MAD over the last 200 un-skipped steps")
    vanish_steps: float = _limit(5, "one small batch is not a trend")
    dead_steps: float = _limit(
        3, "NUMERICS 4.5: exact zero for 3 consecutive steps", seed="a layer's gradient is 0 while others are not",
        why="frozen, unused, zero-initialised and sparse parameters have exact zeros in health",
    )  # fmt: skip

    underflow_sites: float = _limit(0.5, "derived: some branches have small gradients in health, most of a model has not")

    # loss scale
    scale_skips_error: float = _limit(
        5, "seed 000, 3.2; seed 003, 2.4", seed="5 consecutive decreases at any time",
        why="a healthy start searches its scale downwards (6 skips from 2**24); counts only after the first good step",
    )  # fmt: skip
    scale_low_warn: float = _limit(
        128, "seed 000, 3.2", seed="scale < 128: warning; < 1024 in seed 002",
        why="healthy runs end anywhere from 2**11 to 2**18 and lower; a value alone is information",
    )  # fmt: skip
    scale_floor: float = _limit(
        1.0, "seed 000, 3.2", seed="scale = 1: the floor, cannot train",
        why="GradScaler has no floor, it halves for ever; below 1 the gradients themselves do not fit",
    )  # fmt: skip
    scale_collapse_skips: float = _limit(3, "derived: a scale that was set below 1 on purpose may skip once or twice")
    skip_window: float = _limit(200, "MECHANISMS: skip rate over 200 steps")
    skip_rate_warn: float = _limit(0.01, "MECHANISMS; seed 002, 4.4: overflow ratio below 1 % and stable", seed="1 %")
    skip_rate_error: float = _limit(0.10, "MECHANISMS: above 10 % severe")

    # loss
    loss_zscore: float = _limit(8.0, "derived: a loss is noisier than a gradient norm")
    loss_ratio: float = _limit(3.0, "entrenar: 3 times the moving average; both must hold")
    loss_high_steps: float = _limit(3, "derived: one bad batch is not a trend")
    plateau_steps: float = _limit(50, "derived: a bit-identical loss that long, with gradients, means that nothing moves")
    converged: float = _limit(1e-2, "derived: loss or gradient below this share of its beginning is convergence, not trouble")
    explosion_steps: float = _limit(3, "derived: one outlier batch is not an explosion")
    explosion_ratio: float = _limit(100.0, "derived: two orders above its history needs no second step")
    activation_rail: float = _limit(1e3, "derived: outputs this large beside a huge gradient are no matter of loss normalisation")
    update_rail: float = _limit(1.0, "derived: an update as large as the weights throws them away")

    # a model beside its FP32 self
    diff_centred_warn: float = _limit(
        0.25, "NUMERICS fact 6: offset faults give 150 % and more; noise pooled by a healthy CNN varies little and gives 10 %"
    )
    diff_grad_warn: float = _limit(
        0.05, "NUMERICS fact 7: real faults give more than 5 %; where only ReLU flips explain it, the measured floor decides"
    )
    diff_grad_error: float = _limit(0.5, "derived: a gradient that is half noise")
    diff_flip_warn: float = _limit(0.01, "NUMERICS 2, row 29: more than 1 % of decisions differ from the FP32 ones")
    diff_culprit_share: float = _limit(
        0.25, "derived: the first layer with a quarter of the largest own error; what comes later often suffers from it"
    )
    diff_floor_times: float = _limit(
        2.0, "derived: FP32 with each layer's output rounded once (TTrace's floor) does half of it: no operation is to blame"
    )
    diff_energy_share: float = _limit(0.01, "NUMERICS fact 7, judged by energy: a parameter with less does not move the gradient")

    # two runs beside each other
    part_window: float = _limit(25, "derived: steps over which a gap must keep its sign and size; fewer in short runs")
    part_zscore: float = _limit(5.0, "derived: standard errors of the median gap, over thousands of steps and hundreds of layers")
    part_loss_roundoffs: float = _limit(
        5.0, "NUMERICS 2, row 30: a loss gap of 0.25 % matters (DeepSeek-V3); 0.24 % in fp16, 2 % in bf16"
    )
    part_norm: float = _limit(0.10, "NUMERICS 4.3: 25 roundoffs of bf16; less is common among healthy runs of any format")
    part_loss_range: float = _limit(0.01, "derived: a gap below 1 % of what the loss has fallen is not a worse run")

    # a run imagined in another format
    lost_gradient_share: float = _limit(0.01, "derived: share of parameters left without gradient; fewer is a loss, not the end")

    # one operation beside its reference
    op_error_roundoffs: float = _limit(
        4.0, "derived: a correctly rounded result is off by 1; per element, of its magnitude plus the tensor's rms",
        seed="atol = rtol = 0.001 in every dtype", why="fp16 rounds to 0.0005, bf16 to 0.004, fp32 to 6e-8 of the value",
    )  # fmt: skip
    op_l2_roundoffs: float = _limit(2.0, "derived: rounding once gives 0.4 in relative L2; a bias of 1 % in bf16 is 2.6")
    op_fp32_slack: float = _limit(
        32.0, "derived: fp32 kernels round every term, low-precision ones only their result; 128 roundoffs are 8e-6"
    )
    op_conditioning: float = _limit(
        6.0, "measured: times what a roundoff in every input does to the result; kernels in 40 healthy trainings need up to 3.5"
    )
    op_excused_low: float = _limit(
        0.25, "NUMERICS fact 2: sums kept in 16 bits are off by up to 12 % at 512 tokens, by 93 % at 8192; that is an error"
    )

    # updates and optimizer state
    unchanged_share_warn: float = _limit(0.5, "NUMERICS 2, row 2: more than half the elements left bit-identical")
    unchanged_share_error: float = _limit(0.9, "derived: next to nothing is learned")
    eps_dominates_warn: float = _limit(1.0, "NUMERICS 2, row 5: median sqrt(v)/eps below 1")
    eps_dominates_error: float = _limit(0.1, "NUMERICS 2, row 5")

    # one examined step
    damage_consequence: float = _limit(
        0.10, "NUMERICS fact 7: real faults put more than 5 % into the gradients; ReLU flips of healthy small nets up to 8 %"
    )
    damage_certain: float = _limit(
        0.03, "NUMERICS fact 7: healthy nets stay below 1.3 %; enough where the mechanism itself is proved at the operation"
    )
    damage_kept: float = _limit(0.5, "NUMERICS 2, row 2: EDQ below 0.5, more than half of an update or addend is lost")
    damage_flips: float = _limit(0.05, "derived: near-ties of a healthy router flip for about 1 % of the tokens")
    damage_ties: float = _limit(0.2, "derived: choices that low precision makes ties of; healthy scores hardly ever tie")
    damage_last_bit: float = _limit(0.25, "derived: numbers that a format has rounded use its last bit half of the time")
    damage_jump: float = _limit(4.0, "derived: an operation that makes an error so many times larger is the one to ask")
    damage_made: float = _limit(2.0, "derived: an error twice that of what goes in was made here; healthy ones grow slowly")
    damage_fades: float = _limit(5.0, "derived: blame is kept down to this part of the level at which it begins")
    damage_bits_lost: float = _limit(8.0, "derived: a difference this many times smaller than its operands has lost three bits")
    damage_cancelled: float = _limit(8.0, "NUMERICS 2, row 17: a difference below 8 roundoffs of its operands is mostly rounding")
    damage_branch: float = _limit(16.0, "NUMERICS 4.4: absorption of an addend is noticeable at 1/(16u) of the other")
    damage_repeats: float = _limit(8, "derived: a sum that a loop adds up, not a single addition")
    damage_phase: float = _limit(0.1, "NUMERICS 2, row 15: phase error in radians")
    damage_entropy: float = _limit(0.1, "NUMERICS 2, row 7: normalised entropy of attention below 0.05 is a collapse")
    damage_bias: float = _limit(0.5, "NUMERICS 2, row 11: mean error over its spread persistently above 0.5")
    damage_decay: float = _limit(9e-4, "derived: a decay that takes more than a thousand steps is not missed soon")

    # diagnosis
    surprise_noted: float = _limit(3.0, "NUMERICS 2, row 6: RMS of g/sqrt(v) of 2.3 and more goes before a loss spike")
    surprise_spike: float = _limit(5.0, "derived: an update five times too long; together with a loss that rises behind it")
    dead_units_warn: float = _limit(0.8, "derived: four of five units never on, in a run that does not learn")
    dead_units_error: float = _limit(0.98, "derived: a layer that is off; nothing before it gets a gradient")
    lost_gradient_elements: float = _limit(0.1, "derived: a tenth of the weights without their gradient is a fault of the run")
    ratio_gap: float = _limit(1e-4, "derived: on unchanged weights a ratio is 1; one code path gives exactly that, FP32 1e-6")
    trend_points: float = _limit(5, "derived: fewer points on a line are chance")
    trend_fit: float = _limit(0.9, "derived: share of the variation that steady growth explains")
    rounding_bias: float = _limit(0.5, "NUMERICS 2, row 11: mean error over its standard deviation, persistently")
    growth_each: float = _limit(1.15, "derived: per layer or time step; a healthy residual stream grows more slowly")
    growth_whole: float = _limit(1e3, "derived: three orders within one step")
    attention_entropy: float = _limit(0.05, "NUMERICS 2, row 7: normalised entropy of the attention")
    attention_logit: float = _limit(50.0, "NUMERICS 2, row 7")
    decay_missing: float = _limit(0.02, "derived: weights that should be 2 % smaller by now; less is nobody's trouble")
    fade_layers: float = _limit(6, "derived: fewer layers cannot fade, they differ")
    fade_ratio: float = _limit(1e-4, "derived: rms of the first third over that of the last; healthy nets have 1e-2")
    runaway_loss: float = _limit(10.0, "derived: a loss ten times where it began, and staying there, is no bad batch")
    runaway_grad: float = _limit(100.0, "derived: as explosion_ratio, from the first steps on")

    policy_ratio_warn: float = _limit(0.01, "NUMERICS 2, row 28: median |ratio - 1| of a sequence above 1e-2")
    policy_ratio_error: float = _limit(0.2, "PPO's usual clip range: the mismatch alone clips")

    # static checker
    init_scale_low: float = _limit(8.0, "derived: a scale of 8 lifts gradients by 3 of the 24 bits below the fp16 range")
    init_scale_high: float = _limit(2.0**24, "NUMERICS 2: a healthy start from 2**24 skips 6 steps; above is waste")
    growth_factor_high: float = _limit(8.0, "derived: three doublings at once leave the working range of the scale")
    backoff_factor_low: float = _limit(0.05, "derived: one overflow must not cost more than 4 doublings")
    backoff_factor_high: float = _limit(0.95, "derived: ten overflows must at least halve the scale")
    growth_interval_low: float = _limit(20, "derived: each growth may cost a skipped step, at most 5 % of the steps")
    growth_interval_high: float = _limit(1_000_000, "derived: no growth within a common run")
    scale_power_high: float = _limit(32, "DeepSpeed: initial_scale_power is an exponent; 2**32 is beyond any use")


def describe() -> list[dict[str, Any]]:
    """Name, value, source, the seed's number and why it differs; for the docs."""
    return [{"name": f.name, "value": f.default, **f.metadata} for f in fields(Limits)]
