"""Training is bit-identical with and without the tool, does not die of it, and nothing is left behind.

A few programs; all of them, in every setting, in test_all_programs.py. Every worker starts two servers for them, so they run
before landing.
"""

from __future__ import annotations

from typing import Any

import pytest

from .harness import harms, harms_of
from .program import load_programs

pytestmark = pytest.mark.landing

QUICK = (
    "accumulation_one_step_per_micro_batch",
    "autocast_bfloat16",
    "autocast_nested_and_disabled_inside",
    "checkpoint_plain_bf16",
    "checkpoint_reentrant_fp32",
    "clip_every_argument_by_keyword",
    "custom_function",
    "custom_op_with_own_generator",
    "custom_op_with_state",
    "deepcopy_inside_step",
    "double_backward_create_graph",
    "embedding_sparse_gradient",
    "exception_ends_the_run",
    "forward_raises_KeyboardInterrupt",
    "func_per_sample_gradients",
    "gan_two_optimizers",
    "generator_output",
    "grad_modes_inside_training",
    "grad_scaler_overflow",
    "hostile_object_output",
    "module_hooks_replace_everything",
    "modules_swapped_while_training",
    "operators_with_own_generators",
    "pickle_and_save_inside_step",
    "residual_added_in_place",
    "shared_module_called_often",
    "forward_appends_to_a_file",
    "memory_bank_that_backward_needs",
    "updates_in_place_that_overflow",
    "step_left_open_in_generator",
    "torch_dispatch_subclass_input",
    "training_in_another_thread",
    "user_patches_inside_and_keeps_after_close",
)


@pytest.fixture(scope="module")
def programs() -> None:
    load_programs()  # not by every worker that only collects


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("name", QUICK)
def test_representative_program_is_unharmed(name: str) -> None:
    assert harms_of("default", name) == []


def test_a_difference_is_seen() -> None:
    """The comparison itself: what a harmful tool would do is not overlooked."""
    clean: dict[str, Any] = {
        "error": None, "close_error": None, "state": {"w": ["a"]}, "marks": {}, "left": [], "replaced": [], "files": [],
        "warnings": [], "nanny_warnings": [], "damaged": [], "freed": True, "tool_freed": True,
    }  # fmt: skip
    error = {"kind": "ValueError", "message": "x", "place": "a.py:1", "raised_in": []}
    assert harms(clean, clean) == []
    for change in (
        {"state": {"w": ["b"]}},
        {"error": error},
        {"close_error": error},
        {"marks": {"0.": ["_forward_hooks: 1"]}},
        {"left": ["dispatch modes: 0 -> 1"]},
        {"replaced": ["torch.Tensor.backward replaced"]},
        {"files": ["nanny_logs/x"]},
        {"nanny_warnings": ["a", "a"]},
        {"warnings": ["UserWarning: x"]},
        {"damaged": ["SQLite says: no"]},
        {"freed": False},
        {"tool_freed": False},
        {"died": "exit code -11"},
    ):
        assert harms(clean, {**clean, **change}), change
    assert harms(clean, {**clean, "nanny_warnings": ["one is allowed"]}) == []
