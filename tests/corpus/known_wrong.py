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
    ("diagnose", "sudden_batches", ""): "lr_too_high at optimizer.lr: the weights were thrown",
    ("diagnose", "kernel_with_a_race", ""): "float32_overflow at fault: operators of a program are not run twice",
    ("diagnose", "micro_batches_in_bf16", ""): "lr_too_high at optimizer.lr",
    ("diagnose", "feature_grid", ""): "nothing said",
}

# Right on some processors only: low precision numbers differ between them.
DEPENDS_ON_PROCESSOR = {("diagnose", "bright_pictures")}
