"""Healthy models stay silent in both formats; a single planted fault is blamed on the module that has it."""

from __future__ import annotations

import pytest
import torch
from diff_gallery import FAULTS, HEALTHY, sandwich

import nanny
from nanny.records import Severity


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_raise_nothing_above_information(name, dtype):
    torch.manual_seed(0)
    model, x, loss, y = HEALTHY[name]()
    report = nanny.auto_diff(model, x, dtype, loss_fn=loss, target=y)
    assert [f for f in report.findings if f.severity > Severity.INFO] == []
    assert report.total.rel_l2 > 0
    assert not report.reseeds


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, (_, dtypes) in FAULTS.items() for dtype in dtypes])
def test_a_planted_fault_is_blamed_first_on_its_module(name, dtype):
    model, x = sandwich(FAULTS[name][0])
    report = nanny.auto_diff(model, x, dtype)
    assert report.culprits[0] == "fault"
    assert report.findings[0].severity >= Severity.WARNING
