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


CALLS = {"logit": torch.special.logit, "special_xlogy": torch.special.xlogy, "pow": lambda x: torch.pow(x, -1.0)}


@pytest.mark.parametrize("name", sorted(ops.BROKEN_BY_ZERO))
def test_a_zero_breaks_an_operation_in_the_argument_that_the_table_names_and_nowhere_else(name):
    at, call = ops.BROKEN_BY_ZERO[name], CALLS.get(name, getattr(torch, name, None))
    for zero in range({"addcdiv": 3, "xlogy": 2, "special_xlogy": 2}.get(name, at + 1)):
        arguments = [torch.tensor([0.0 if i == zero else 0.5]) for i in range(max(at + 1, zero + 1))]
        assert bool(torch.isfinite(call(*arguments))) is (zero != at), zero


@pytest.mark.parametrize("name", sorted(ops.PROMOTING))
def test_half_beside_float32_is_float32_where_the_table_says_so(name):
    count = 3 if name.startswith("addc") else 2
    half, *wide = torch.ones(1, dtype=torch.float16), *[torch.ones(1)] * (count - 1)
    assert getattr(torch, name)(half, *wide).dtype == torch.float32


def test_a_product_divides_by_nothing():
    assert "mul" not in SINGULAR_AT_ZERO
    assert "mul" not in DIVISIONS
