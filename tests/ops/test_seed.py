"""Every snippet of the source document runs, with the import changed to `from nanny import ...`."""

# ruff: noqa: E501  (the document's own lines)
from __future__ import annotations

import pytest
import torch
from torch import nn

import nanny
from nanny import ModuleInfo, NannyError, open_module_tracker
from nanny.ops import watch as ops_watch
from ops.op_models import WrongKernel, images

SNIPPETS = {
    "compare": """
from nanny import CompareWithCPU

model = get_your_model()
with CompareWithCPU(atol=0.001, rtol=0.001, verbose=True):
    train(model)
""",
    "disabled": """
from nanny import CompareWithCPU
model = get_your_model()
with CompareWithCPU(enabled=False, atol=0.001, rtol=0.001, verbose=True):
    train(model)
""",
    "tracker": """
from nanny import open_module_tracker, ModuleInfo, CompareWithCPU

model = get_your_model()
open_module_tracker(model)
with CompareWithCPU(atol=0.001, rtol=0.001, verbose=True):
    train(model)
""",
    "nan": """
from nanny import NanInfTracker

model = get_your_model()
with NanInfTracker():
    train(model)
""",
    "target": """
from nanny import CompareWithCPU, open_module_tracker

model = get_your_model()
open_module_tracker(model)
with CompareWithCPU(atol=0.001, rtol=0.001, target_op=['torch.ops.aten.addmm']):
    train(model)
""",
    "tolerance": """
from nanny import CompareWithCPU, open_module_tracker

model = get_your_model()
open_module_tracker(model)
with CompareWithCPU(atol=0.01, rtol=0.01, target_op=['torch.ops.aten.addmm']):
    train(model)
""",
    "white": """
from nanny import CompareWithCPU, open_module_tracker

model = get_your_model()
open_module_tracker(model)
with CompareWithCPU(atol=0.001, rtol=0.001, white_list=['torch.ops.aten.addmm']):
    train(model)
""",
    "steps": """
from nanny import open_module_tracker, ModuleInfo, CompareWithCPU

model = get_your_model()
open_module_tracker(model)
with CompareWithCPU(atol=0.001, rtol=0.001, verbose=True, start_step=5) as compare_with_cpu:
    for epoch in range(epoch_num):
        for step in range(step_num):
            train_step(model)
            compare_with_cpu.step()
""",
    "ranks": """
from nanny import open_module_tracker, ModuleInfo, CompareWithCPU

model = get_your_model()
open_module_tracker(model)
with CompareWithCPU(atol=0.001, rtol=0.001, verbose=True, should_log_to_file=True, output_dir='path_to_save'):
    train(model)
with CompareWithCPU(atol=0.001, rtol=0.001, verbose=True, should_log_to_file=True, output_dir='path_to_save', enable_ranks=[0]):
    train(model)
""",
}
DUMP = """
from nanny import CompareWithCPU, open_module_tracker

model = get_your_model()
open_module_tracker(model)
with CompareWithCPU(atol=0.01, rtol=0.01, verbose=True, target_op=['torch.ops.aten.addmm'], dump_error_data=True, output_dir='path_to_save'):
    train(model)
"""
REPLAY = """
from nanny import compare_for_single_op, nan_inf_track_for_single_op

correct, args, kwargs, out = compare_for_single_op('path_to_save/torch.ops.aten.addmm_inputs.pkl', torch.ops.aten.addmm, atol=0.01, rtol=0.01)
finite, args, kwargs, out = nan_inf_track_for_single_op('path_to_save/torch.ops.aten.addmm_inputs.pkl', torch.ops.aten.addmm)
"""


def train_step(model):
    _, x, y = images()
    nn.functional.cross_entropy(model(x), y).backward()


def surroundings():
    return {
        "torch": torch,
        "get_your_model": lambda: images()[0],
        "train": train_step,
        "train_step": train_step,
        "epoch_num": 2,
        "step_num": 4,
    }


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    for tracker in list(ops_watch._trackers):
        tracker.close()


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_runs_and_a_healthy_model_is_no_error(name, capsys, tmp_path):
    exec(SNIPPETS[name], surroundings())
    said = capsys.readouterr().err + "".join(p.read_text() for p in tmp_path.glob("path_to_save/*.log"))
    assert "[ERROR]" not in said
    assert "[WARNING]" not in said
    if "verbose=True" in SNIPPETS[name] and name != "disabled":
        assert "Cnn/Conv2d/torch.ops.aten.convolution(forward) [conv] succeeds to pass CompareWithCPU test" in said
    if name == "white":
        assert "white list" in said
    if name == "steps":
        assert [f"step = {i}" in said for i in range(8)] == [False] * 5 + [True] * 3


def test_the_dump_of_the_document_is_made_and_replayed(capsys):
    with WrongKernel("addmm", lambda t: t.add_(1)), pytest.raises(NannyError, match=r"torch\.ops\.aten\.addmm at head"):
        exec(DUMP, surroundings())
    assert "[ERROR] Cnn/Linear/torch.ops.aten.addmm(forward) [head] fails to pass CompareWithCPU test" in capsys.readouterr().err
    space = surroundings()
    exec(REPLAY, space)
    assert space["correct"] is True
    assert space["finite"] is True


def test_the_tracker_opened_twice_is_one_and_closes():
    model = images()[0]
    first, second = open_module_tracker(model), open_module_tracker(model)
    assert first is second
    seen = []
    model.head.register_forward_pre_hook(lambda *_: seen.append(ModuleInfo.current()))
    model(torch.randn(2, 3, 12, 12))
    assert seen[0] == ModuleInfo("head", "Cnn/Linear", "forward")
    first.close()
    second.close()
    assert not torch.nn.modules.module._global_forward_pre_hooks
    with open_module_tracker(model):
        assert torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    with pytest.raises(NannyError, match=r"torch\.nn\.Module"):
        open_module_tracker("model")


def test_an_exception_inside_leaves_neither_hooks_nor_modes():
    model = images()[0]
    with pytest.raises(RuntimeError), nanny.CompareWithCPU(), nanny.NanInfTracker():
        model(torch.randn(2, 4, 12, 12))
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert torch._C._len_torch_dispatch_stack() == 0
    with nanny.NanInfTracker() as tool:
        model(torch.randn(2, 3, 12, 12))
    assert tool.faults == []
