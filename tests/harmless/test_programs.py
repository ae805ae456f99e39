"""Training is bit-identical with and without the tool, does not die of it, and nothing is left behind.

KNOWN_HARM lists what breaks this promise today. Such a test must fail: once it is mended, its line has to go.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from .harness import HERE, SETTINGS, differing, harms, harms_of, known_harm, plain_record, run_program
from .program import BUILDS, load_programs

load_programs()
KNOWN = known_harm()
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
    "sixth_forward_appends_to_a_file",
    "sixth_memory_bank_that_backward_needs",
    "sixth_updates_in_place_that_overflow",
    "step_left_open_in_generator",
    "torch_dispatch_subclass_input",
    "training_in_another_thread",
    "user_patches_inside_and_keeps_after_close",
)


def _cases() -> list[Any]:
    cases = []
    for setting in SETTINGS:
        for name in sorted(BUILDS):
            reason = KNOWN.get((name, setting))
            marks = [pytest.mark.slow] + ([pytest.mark.xfail(strict=True, reason=reason)] if reason else [])
            cases.append(pytest.param(name, setting, marks=marks, id=f"{setting}-{name}"))
    return cases


@pytest.mark.parametrize("name", QUICK)
def test_representative_program_is_unharmed(name: str) -> None:
    assert harms_of("default", name) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUILDS))
def test_program_alone_is_the_same_twice(name: str) -> None:
    """A program that differs from itself proves nothing about a tool."""
    record, again = plain_record(name), run_program("plain", name)
    assert "died" not in record
    assert differing(record["state"], again["state"]) == []
    assert record["error"] == again["error"]


@pytest.mark.parametrize(("name", "setting"), _cases())
def test_program_is_unharmed(name: str, setting: str) -> None:
    assert harms_of(setting, name) == []


def test_known_harm_names_programs_and_settings() -> None:
    assert {name for name, _ in KNOWN} <= set(BUILDS)
    assert {setting for _, setting in KNOWN} <= set(SETTINGS)


def test_what_the_readme_names_is_there() -> None:
    text = (HERE / "README.md").read_text().partition("## What was broken once")[2]
    named = re.findall(r"`([^` ]+)`", text)
    files = {name for name in named if "/" in name or name.endswith(".py")}
    places = (HERE, HERE.parent, HERE.parent.parent)
    assert {name for name in files if not any((place / name).exists() for place in places)} == set()
    assert set(named) - files - {"code"} <= set(BUILDS)
    assert len(set(named) - files) > 20


def test_a_difference_is_seen() -> None:
    """The comparison itself: what a harmful tool would do is not overlooked."""
    clean: dict[str, Any] = {
        "error": None, "close_error": None, "state": {"w": ["a"]}, "marks": {}, "left": [], "replaced": [], "files": [],
        "warnings": [], "nanny_warnings": [], "freed": True, "tool_freed": True,
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
        {"freed": False},
        {"tool_freed": False},
        {"died": "exit code -11"},
    ):
        assert harms(clean, {**clean, **change}), change
    assert harms(clean, {**clean, "nanny_warnings": ["one is allowed"]}) == []
