"""Prompts that an agent's user can pick: each is a plan in words, with the tools to use."""

from __future__ import annotations


def check_before_training(path: str = ".") -> str:
    """Check this project before training."""
    return f"""Check {path} for mixed-precision mistakes before training starts.

1. Call check_code with path {path!r}. If there are more findings than one answer holds, page on with next_offset.
2. For each code that is new to you call explain once.
3. Open the named lines and decide for each finding whether it is real in this program; say why when you think it is not.
4. Propose the smallest change for each real one, errors first. Do not change anything else.
5. End with what could not be judged from source alone, and the command that would settle it: `nanny diff --model FILE --input
   sample.pt --dtype bf16` for layer errors, `nanny run train.py` for a short trial run.
"""


def explain_failed_run(db: str = "", run: str = "") -> str:
    """Explain why this run went wrong."""
    which = f" (db {db!r}" + (f", run {run})" if run else ")") if db else (f" (run {run})" if run else "")
    return f"""Explain why the recorded training run{which} went wrong.

1. list_runs, unless the run is named; then first_anomaly: step, layer, and what had warned before.
2. diagnose: take the first diagnosis as the hypothesis. Read its evidence, its chain and precision_caused.
3. explain its cause. If `where` names a file and line, check_code on that file and read the code around the line.
4. Use layer_history on the culprit, and findings around the step, to test the hypothesis against the numbers.
5. Answer in this order: what happened (step, place, numbers), why, whether precision is the cause at all, what to change (as a
   patch if the file is known), and the `confirm` experiment. Say plainly what is not proved.
"""


def plan_lower_precision(dtype: str = "bf16") -> str:
    """Plan the move from FP32 to BF16 or FP16."""
    scaler = (
        "FP16 needs a GradScaler: plan where scale, unscale_, clip, step and update go."
        if dtype == "fp16"
        else "BF16 needs no GradScaler: its range is that of FP32, its resolution is 8 bits."
    )
    return f"""Plan the move of this project's training from FP32 to {dtype}.

1. check_code on the project with amp_dtype {dtype!r}: what would break by construction.
2. If an FP32 run is recorded, what_if with dtype {dtype!r}: which layers would lose range, and how much. It judges range, not
   resolution.
3. {scaler} Keep master weights, optimizer states, losses, softmax and norms of hand-written code, EMA and metrics in FP32.
4. Have the user run `nanny diff --model FILE --input sample.pt --dtype {dtype}` (or call diff if this server may run code) and
   keep in FP32 what its advisor names.
5. Answer with an ordered list of changes, each with its reason and number, and the short trial run that would confirm them:
   `nanny run train.py`, then compare_runs against the FP32 run.
"""


PROMPTS = (check_before_training, explain_failed_run, plan_lower_precision)
