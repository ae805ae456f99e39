"""What is answered wrongly today: (tool, program, variant) -> what is said instead.

The variant of a program as written is "", and "*" stands for all its variants. A line is a test that must fail: who mends one
removes it here, or the suite turns red.
"""

from __future__ import annotations

KNOWN_WRONG: dict[tuple[str, str, str], str] = {
    ("diagnose", "delayed_scaling", ""): "nothing said",
    ("diagnose", "delayed_scaling", "*"): "nothing said",
    ("examine", "delayed_scaling", ""): "nothing said",
    ("examine", "delayed_scaling", "*"): "nothing said",
    ("diagnose", "poisoned_statistics", ""): "nothing said",
    ("diagnose", "poisoned_statistics", "*"): "nothing said",
    ("diagnose", "logits_far_from_zero", ""): "nothing said",
    ("diagnose", "logits_far_from_zero", "*"): "nothing said",
    ("examine", "logits_far_from_zero", ""): "nothing said",
    ("examine", "logits_far_from_zero", "*"): "nothing said",
    ("diagnose", "parameter_used_many_times", ""): "the right cause at loop:accumulation",
    ("diagnose", "parameter_used_many_times", "*"): "the right cause at loop:accumulation",
    ("diagnose", "distances_far_from_the_origin", ""): "scale_imbalance_absorption at fault",
    ("diagnose", "distances_far_from_the_origin", "*"): "scale_imbalance_absorption at fault",
    ("examine", "distances_far_from_the_origin", ""): "scale_imbalance_absorption at fault",
    ("examine", "distances_far_from_the_origin", "*"): "scale_imbalance_absorption at fault",
    ("examine", "codebook", ""): "target_in_low_precision at quantize",
    ("examine", "codebook", "*"): "target_in_low_precision at quantize",
    ("examine", "broken_sensor", ""): "data_nan at data:target",
    ("examine", "broken_sensor", "*"): "data_nan at data:target",
    ("monitor", "distances_by_expansion_fixed", ""): "false alarm: GRAD_EXPLOSION",
    ("monitor", "loss_not_converted_fixed", ""): "false alarm: GRAD_EXPLOSION",
    # right as written, wrong in a variant
    ("diagnose", "distances_by_expansion", "size rows=16 width=512"): "nothing said",
    ("diagnose", "distances_by_expansion", "size rows=64 width=128"): "activation_overflow_fp16 at fault, in bf16",
    ("diagnose", "variance_of_shifted_squares", "size rows=16 width=512"): "scale_imbalance_absorption at fault",
    ("examine", "variance_of_shifted_squares", "size rows=16 width=512"): "scale_imbalance_absorption at fault",
    ("examine", "drifted_logits", "size vocabulary=5000"): "nothing said",
    ("examine", "finite_difference", "format fp16"): "nothing said",
    ("examine", "distances_by_expansion", "seed 1"): "nothing said",
    ("examine", "adam_in_half", "seed 1"): "eps_underflow_fp16 at last",
    ("examine", "batch_norm_of_two", "seed 2"): "false alarm: scale_imbalance_absorption",
}

# Right on some processors only: low precision numbers differ between them.
DEPENDS_ON_PROCESSOR = {("diagnose", "bright_pictures")}
