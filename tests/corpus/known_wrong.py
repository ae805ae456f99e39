"""What is answered wrongly today: (tool, program, variant) -> what is said instead.

The variant of a program as written is "", and "*" stands for all its variants. A line is a test that must fail: who mends one
removes it here, or the suite turns red.
"""

from __future__ import annotations

KNOWN_WRONG: dict[tuple[str, str, str], str] = {
    ("diagnose", "sudden_batches", ""): "data_outlier at data: six batches of it, which Adam's moments make worse",
    ("diagnose", "sudden_batches", "misnamed"): "data_outlier at data",
    ("diagnose", "sudden_batches", "seed 1"): "data_outlier at data",
    ("diagnose", "sudden_batches_fixed", "seed 1"): "false alarm: optimizer_v_lag",
    ("diagnose", "kernel_with_a_race", ""): "nothing said: operators of a program are not run twice",
    ("diagnose", "kernel_with_a_race", "*"): "nothing said",
    (
        "monitor",
        "sudden_batches",
        "",
    ): "nothing said: a loss that jumps behind a usual update may be a new task",
    ("monitor", "plain_rnn", ""): "nothing said, for the same reason",
    ("monitor", "deep_stack", ""): "nothing said, for the same reason",
}

# Right on some machines only: low precision numbers differ between processors, and a step of 1,024 backward passes may take
# longer than an examination.
DEPENDS_ON_MACHINE = {("diagnose", "bright_pictures"), ("diagnose", "chunked_corpus")}
