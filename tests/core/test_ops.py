"""The one table of operations: every name in it exists in torch, and a family knows an operation under any spelling."""

from __future__ import annotations

import pytest
import torch

from nanny.core import ops
from nanny.core.ops import ADDITIONS, DIVISIONS, MATMULS, SCATTERS, SINGULAR_AT_ZERO, SOFTMAXES, OpFamily

FAMILIES = {name: value for name, value in vars(ops).items() if isinstance(value, OpFamily)}
# Spelled as functions and as autograd's nodes spell them; aten has them under another name or not at all.
NOT_ATEN = {"half", "to", "dist", "fused_rms_norm", "rnn_tanh", "rnn_relu", "reshape_copy", "multilabel_margin_loss_forward"}


def exists(name: str) -> bool:
    spellings = (name, f"_{name}", f"{name}_", f"_{name}_", f"_foreach_{name}", f"linalg_{name}")
    return any(hasattr(torch.ops.aten, s) or hasattr(torch.nn.functional, s) or hasattr(torch, s) for s in spellings)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_operation_of_a_family_exists(family):
    assert {name for name in FAMILIES[family] if not exists(name)} <= NOT_ATEN


@pytest.mark.parametrize("name", ["add", "add_", "_foreach_add", "_foreach_add_"])
def test_a_family_knows_every_spelling(name):
    assert name in ADDITIONS


def test_a_family_holds_bare_names_only():
    for family in FAMILIES.values():
        assert all(ops.bare_op(name) == name for name in frozenset(family))


def test_a_union_of_families_is_a_family():
    assert "_softmax" in MATMULS | SOFTMAXES
    assert "index_put_" in SCATTERS | {"mul"}


def test_a_product_divides_by_nothing():
    assert "mul" not in SINGULAR_AT_ZERO
    assert "mul" not in DIVISIONS
