"""Which type each operation runs in, under the CPU's own lists, the CUDA lists on a CPU, and a plain cast."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nanny


class Every(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = self.linear(x)
        cat, norm = torch.cat([h, h.float()]), torch.nn.functional.layer_norm(h, (8,))
        parts = (h.softmax(-1), h.exp(), h.sum(-1), h.mean(-1), h.sigmoid(), h.pow(2), h * h, cat, norm)
        return tuple(part.float() for part in parts)


def types(policy: str) -> dict[str, set[str]]:
    report = nanny.auto_diff(Every(), torch.randn(4, 8), "bf16", policy=policy, backward=False)
    out: dict[str, set[str]] = {}
    for use in report.operations:
        out.setdefault(use.op, set()).add(use.dtype)
    return out


CUDA_ONLY = ["_softmax", "exp", "sum", "pow", "native_layer_norm"]
ALWAYS_LOW = ["addmm", "mean", "sigmoid", "mul"]


@pytest.mark.parametrize("policy", ["native", "cpu", "cuda", "full"])
def test_operations_run_in_the_types_of_the_policy(policy):
    seen, wide = types(policy), "float32" if policy == "cuda" else "bfloat16"
    assert {op: seen[op] for op in CUDA_ONLY} == {op: {wide} for op in CUDA_ONLY}
    assert {op: seen[op] for op in ALWAYS_LOW} == {op: {"bfloat16"} for op in ALWAYS_LOW}
    assert seen["cat"] == {"float32"}


def test_backward_goes_through_the_cuda_lists():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 2))
    report = nanny.auto_diff(model, torch.randn(4, 8), "bf16", policy="cuda", loss_fn=lambda out: out.square().mean())
    assert [c.dtype for c in report.calls] == ["bfloat16", "float32", "bfloat16", "bfloat16"]
    assert 0 < report.total.rel_l2 < 0.05


def test_an_unknown_policy_is_refused():
    with pytest.raises(nanny.NannyError, match="unknown policy"):
        nanny.auto_diff(nn.Linear(2, 2), torch.randn(2, 2), policy="tpu")


def test_the_table_per_module_is_shown_on_request(tmp_path, monkeypatch, capsys):
    from nanny.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text("from torch import nn\nmodel = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))\n")
    torch.save(torch.randn(2, 4), "s.pt")
    assert main(["diff", "--model", "m.py", "--input", "s.pt", "--policy", "cuda", "--all", "--no-backward"]) == 0
    assert "1       _softmax   float32" in capsys.readouterr().out
