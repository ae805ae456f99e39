"""An operation that went wrong is saved as it was, and can be run again; nothing in a dump is ever executed."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nanny import (
    CompareWithCPU,
    MixedPrecisionNanny,
    NanInfTracker,
    NannyError,
    compare_for_single_op,
    nan_inf_track_for_single_op,
)
from nanny.cli import main
from nanny.core.examination import Place
from nanny.ops.records import OpFault
from nanny.ops.reference import call_before
from nanny.ops.watch import save_call
from nanny.watch.dump import digest, load_dump, operation_of
from ops.op_models import WrongKernel, language, train


def dumped(folder, name, program, change=lambda t: t.mul_(1.5), **options):
    tool = CompareWithCPU(dump_error_data=True, output_dir=folder, strict=True, **options)
    with WrongKernel(name, change), pytest.raises(NannyError, match="nanny replay"), tool:
        program()
    return folder / f"torch.ops.aten.{name}_inputs.safetensors"


def test_the_first_fault_stops_the_program_and_is_found_and_replayed(tmp_path, capsys):
    folder = tmp_path / "not" / "there" / "yet"
    model, x, y = language()
    path = dumped(folder, "addmm", lambda: train(model, x, y, amp=torch.bfloat16))
    assert sorted(p.name for p in folder.iterdir()) == [
        "torch.ops.aten.addmm_inputs.json",
        "torch.ops.aten.addmm_inputs.safetensors",
        "torch.ops.aten.addmm_outputs.safetensors",
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600  # it holds training data
    correct, args, kwargs, out = compare_for_single_op(path, torch.ops.aten.addmm)
    assert correct  # here the kernel is right
    assert out.dtype == torch.bfloat16
    assert len(args) == 3
    assert kwargs == {}
    capsys.readouterr()
    assert main(["replay", str(path)]) == 1
    said = capsys.readouterr().out
    assert "torch.ops.aten.addmm(forward) [blocks.0.attn.qkv] was dumped at step 0 (mismatch)" in said
    assert "stored result: differs from the reference" in said
    assert "run again here: agrees" in said
    assert "does not come back on this machine" in said
    with WrongKernel("addmm", lambda t: t.mul_(1.5)):
        assert not compare_for_single_op(path, torch.ops.aten.addmm)[0]


def test_the_old_names_lead_to_the_dump_and_are_never_unpickled(tmp_path):
    dumped(tmp_path, "exp", lambda: torch.ones(3).exp())
    assert compare_for_single_op(tmp_path / "torch.ops.aten.exp_inputs.pkl", torch.ops.aten.exp, atol=0.01, rtol=0.01)[0]
    assert compare_for_single_op(str(tmp_path / "torch.ops.aten.exp_inputs.pkl"))[0]
    assert nan_inf_track_for_single_op(tmp_path / "torch.ops.aten.exp_inputs.pkl", torch.ops.aten.exp)[0]
    marker = tmp_path / "ran"
    (tmp_path / "evil_inputs.pkl").write_bytes(f"cos\nsystem\n(S'touch {marker}'\ntR.".encode())
    with pytest.raises(NannyError, match="pickles are never loaded"):
        compare_for_single_op(tmp_path / "evil_inputs.pkl", torch.ops.aten.exp)
    assert not marker.exists()


def test_inputs_are_those_from_before_an_operation_that_writes_into_them(tmp_path):
    x = torch.arange(4.0)
    path = dumped(tmp_path, "mul_", lambda: x.mul_(2))
    correct, args, _, out = compare_for_single_op(path, torch.ops.aten.mul_)
    assert correct
    assert args[0].tolist() == [0, 1, 2, 3]
    assert out.tolist() == [0, 2, 4, 6]
    assert load_dump(path).outputs[0].tolist() == [0, 3, 6, 9]


def test_a_nan_is_saved_with_its_inputs(tmp_path):
    tool = NanInfTracker(dump_error_data=True, output_dir=tmp_path, strict=True)
    model = nn.Sequential(nn.Linear(2, 2), nn.Flatten())
    with pytest.raises(NannyError, match=r"torch\.ops\.aten\.sqrt at op:sqrt makes NaN"), tool:
        model(torch.ones(1, 2)).sub(100).sqrt().exp()
    finite, args, _, out = nan_inf_track_for_single_op(tmp_path / "torch.ops.aten.sqrt_inputs.pkl", torch.ops.aten.sqrt)
    assert not finite
    assert bool((args[0] < 0).all())
    assert bool(out.isnan().all())
    assert main(["replay", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (torch.ops.aten.addmm.default, (torch.ones(3), torch.randn(2, 4), torch.randn(3, 4).t()), {"beta": 0.1, "alpha": 1e-30}),
        (torch.ops.aten._to_copy.default, (torch.randn(3).bfloat16(),), {"dtype": torch.float16}),
        (torch.ops.aten.clone.default, (torch.randn(1, 2, 3, 4),), {"memory_format": torch.channels_last}),
        (torch.ops.aten.masked_fill.Scalar, (torch.randn(3), torch.tensor([True, False, True])), {"value": float("-inf")}),
        (torch.ops.aten.full.default, ([2, 3], float("nan")), {"dtype": torch.float64, "device": torch.device("cpu")}),
        (torch.ops.aten._foreach_add.List, ([torch.ones(2), torch.ones(3)], [torch.ones(2), torch.ones(3)]), {"alpha": 2}),
        (torch.ops.aten.cat.default, ([torch.ones(2), torch.tensor([], dtype=torch.float32)], 0), {}),
        (torch.ops.aten.add.Tensor, (torch.tensor(2.0), torch.ones(3).expand(2, 3)), {}),
        (torch.ops.aten.mul.Tensor, (torch.randn(2, dtype=torch.complex64), torch.tensor(2)), {}),
        (torch.ops.aten._to_copy.default, (torch.randn(3).to(torch.float8_e4m3fn),), {"dtype": torch.float32}),
    ],
    ids=lambda v: str(v) if callable(v) else "",
)
def test_every_kind_of_argument_survives(tmp_path, func, args, kwargs):
    call = call_before(func, args, kwargs)
    out = func(*args, **kwargs)
    results = list(out) if isinstance(out, (list, tuple)) else [out]
    path = save_call(tmp_path, call, results, OpFault(str(func), "mismatch", Place()))
    stored = load_dump(path)
    assert operation_of(stored) is func
    again = func(*stored.args, **stored.kwargs)
    for new, old, kept in zip(again if isinstance(again, (list, tuple)) else [again], results, stored.outputs):
        assert torch.equal(new.nan_to_num(), old.nan_to_num()) if new.dtype.itemsize > 1 else True
        assert new.dtype == old.dtype == kept.dtype
        assert new.stride() == old.stride()
    assert kwargs == stored.kwargs or "value" in kwargs


def test_dumps_of_one_operation_do_not_overwrite_each_other_and_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr("nanny.ops.watch.MOST_DUMPS", 3)
    tool = CompareWithCPU(dump_error_data=True, stop_on_error=False, output_dir=tmp_path, strict=True)
    with WrongKernel("exp", lambda t: t.add_(1)), tool:
        for i in range(5):
            torch.full((2,), float(i)).exp()
    assert len(tool.faults) == 5
    assert len(list(tmp_path.glob("*_inputs.safetensors"))) == 3
    assert load_dump(tmp_path / "torch.ops.aten.exp.3_inputs.pkl").args[0].tolist() == [2, 2]


def test_tensors_that_are_too_large_are_not_saved_and_that_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nanny.ops.watch.MOST_BYTES", 100)
    tool = CompareWithCPU(dump_error_data=True, stop_on_error=False, output_dir=tmp_path, strict=True)
    with WrongKernel("exp", lambda t: t.add_(1)), tool:
        torch.ones(100).exp()
    assert "too large" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def edited(path, **changes):
    about = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps({**about, **changes}))


def test_a_dump_cannot_make_nanny_call_anything_but_computation(tmp_path):
    path = dumped(tmp_path, "exp", lambda: torch.ones(3).exp())
    edited(path, op="torch.ops.c10d.barrier")
    with pytest.raises(NannyError, match="custom operation; pass it"):
        compare_for_single_op(path)
    edited(path, op="torch.ops.aten.no_such_operation")
    with pytest.raises(NannyError, match="has no"):
        compare_for_single_op(path)
    edited(path, op="torch.ops.aten.exp", args=[{"torch": "load"}])
    with pytest.raises(NannyError, match="no type of torch"):
        compare_for_single_op(path)


def test_damaged_and_missing_dumps_are_told_in_one_sentence(tmp_path, capsys):
    path = dumped(tmp_path, "exp", lambda: torch.ones(3).exp())
    with pytest.raises(NannyError, match=r"holds torch\.ops\.aten\.exp, not torch\.ops\.aten\.log"):
        compare_for_single_op(path, torch.ops.aten.log)
    path.write_bytes(path.read_bytes()[:-4] + b"1234")
    with pytest.raises(NannyError, match="damaged or was changed"):
        load_dump(path)
    path.with_suffix(".json").write_text("{")
    with pytest.raises(NannyError, match="not a readable dump"):
        load_dump(path)
    assert main(["replay", str(tmp_path / "nothing")]) == 2
    assert "no such dump" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["replay", str(tmp_path / "empty")]) == 2


@pytest.mark.slow
def test_replay_runs_in_a_process_of_its_own(tmp_path):
    tool = CompareWithCPU(dump_error_data=True, output_dir=tmp_path, strict=True)
    with pytest.raises(NannyError), tool:
        torch.full((4,), 300.0, dtype=torch.float16) * 300
    done = subprocess.run(
        [sys.executable, "-m", "nanny.cli", "replay", str(tmp_path)], capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert done.returncode == 1
    assert "run again here: differs from the reference, holds NaN or Inf" in done.stdout
    assert "the result 90000 does not fit into float16 (largest 65504)" in done.stdout
    assert "Traceback" not in done.stderr


# dumps of strangers


def hostile(folder, op, *args, overload="", tensors=None, **kwargs):
    """A dump with a right digest that names what it likes."""
    tensors = {"input.0": torch.ones(2)} if tensors is None else tensors
    path = folder / "evil_inputs.safetensors"
    save_file(tensors, str(path))
    about = {"version": 2, "op": op, "overload": overload, "args": list(args), "kwargs": kwargs, "options": {}, "classes": ""}
    about |= {"kind": "nan", "dtype": "", "step": 0, "rank": 0, "torch_version": torch.__version__, "sha256": digest(path)}
    about["place"] = {"site": "", "module": "", "phase": "forward", "file": "", "line": None}
    path.with_suffix(".json").write_text(json.dumps(about))
    return path


def tensor(key="input.0", stride=(1,)):
    return {"tensor": key, "shape": [2], "stride": list(stride), "dtype": "float32", "device": "cpu"}


HUGE = 1 << 40
OUT = tensor()
HOSTILE = {
    "from_file": lambda f: hostile(f, "torch.ops.aten.from_file", str(f / "made"), True, 1 << 20),
    "from_file into one": lambda f: hostile(f, "torch.ops.aten.from_file", str(f / "made"), True, 8, overload="out", out=OUT),
    "full into a tensor": lambda f: hostile(f, "torch.ops.aten.full", {"list": [HUGE]}, 1, overload="out", out=tensor()),
    "another device": lambda f: hostile(f, "torch.ops.aten._to_copy", tensor(), device={"device": "meta"}),
    "empty": lambda f: hostile(f, "torch.ops.aten.empty", {"list": [HUGE]}, overload="memory_format"),
    "new_empty": lambda f: hostile(f, "torch.ops.aten.new_empty", tensor(), {"list": [HUGE]}),
    "full": lambda f: hostile(f, "torch.ops.aten.full", {"list": [HUGE]}, 1),
    "repeat": lambda f: hostile(f, "torch.ops.aten.repeat", tensor(), {"list": [HUGE]}),
    "repeat with an overflow": lambda f: hostile(f, "torch.ops.aten.repeat", tensor(), {"list": [1 << 62, 1 << 62]}),
    "resize_": lambda f: hostile(f, "torch.ops.aten.resize_", tensor(), {"list": [HUGE]}),
    "pad": lambda f: hostile(f, "torch.ops.aten.constant_pad_nd", tensor(), {"list": [HUGE, HUGE]}),
    "outer": lambda f: hostile(
        f, "torch.ops.aten.mul", tensor(), tensor("input.1"), overload="Tensor",
        tensors={"input.0": torch.ones(1 << 18, 1), "input.1": torch.ones(1, 1 << 18)},
    ),
    "bincount": lambda f: hostile(f, "torch.ops.aten.bincount", tensor(), tensors={"input.0": torch.tensor([0, HUGE])}),
    "repeat_interleave": lambda f: hostile(
        f, "torch.ops.aten.repeat_interleave", tensor(), overload="Tensor", tensors={"input.0": torch.tensor([1, HUGE])}
    ),
    "histc": lambda f: hostile(f, "torch.ops.aten.histc", tensor(), HUGE),
    "set_": lambda f: hostile(f, "torch.ops.aten.set_", tensor(), tensor(), overload="source_Tensor"),
    "random": lambda f: hostile(f, "torch.ops.aten.bernoulli_", tensor(), overload="float"),
    "a namespace's attribute": lambda f: hostile(f, "torch.ops.aten.__class__", tensor()),
    "an operation's attribute": lambda f: hostile(f, "torch.ops.aten.exp", tensor(), overload="__init__"),
    "load_library": lambda f: hostile(f, "torch.ops.load_library", str(f / "x.so")),
    "a print": lambda f: hostile(f, "torch.ops.aten._print", "hello"),
    "wrong arguments": lambda f: hostile(f, "torch.ops.aten.addmm", tensor(), 3, {"tuple": [tensor()]}),
    "a device of nobody": lambda f: hostile(f, "torch.ops.aten.exp", {**tensor(), "device": "teapot:9"}),
    "strides of a bomb": lambda f: hostile(f, "torch.ops.aten.exp", tensor(stride=(HUGE,))),
    "strides too many": lambda f: hostile(f, "torch.ops.aten.exp", tensor(stride=(3, 1, 1))),
    "negative strides": lambda f: hostile(f, "torch.ops.aten.exp", tensor(stride=(-1,))),
    "no such tensor": lambda f: hostile(f, "torch.ops.aten.exp", tensor("input.7")),
    "an endless list": lambda f: nested(hostile(f, "torch.ops.aten.exp", tensor())),
    "a number that is none": lambda f: hostile(f, "torch.ops.aten.add", tensor(), {"float": "0x1p99999"}, overload="Scalar"),
}  # fmt: skip


def nested(path):
    about = json.loads(path.with_suffix(".json").read_text())
    deep = '{"list": [' * 50_000 + "]}" * 50_000
    path.with_suffix(".json").write_text(json.dumps({**about, "args": []})[:-1] + f', "args": [{deep}]}}')
    return path


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_dump_is_refused_in_one_sentence_and_does_nothing(name, tmp_path, capsys):
    path = HOSTILE[name](tmp_path)
    before = sorted(tmp_path.iterdir())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main(["replay", str(path)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("nanny: ")
    assert said.err.count("\n") == 1, said.err
    assert said.out == ""
    assert sorted(tmp_path.iterdir()) == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 1 << 20  # of kilobytes


def test_a_pipe_and_a_giant_are_no_dumps(tmp_path, capsys):
    path = hostile(tmp_path, "torch.ops.aten.exp", tensor())
    assert main(["replay", str(path)]) == 0
    with open(path.with_suffix(".json"), "r+b") as file:
        file.truncate(1 << 34)
    assert main(["replay", str(path)]) == 2
    assert "at most 16 MB" in capsys.readouterr().err
    hostile(tmp_path, "torch.ops.aten.exp", tensor())
    os.truncate(path, 1 << 40)
    assert main(["replay", str(path)]) == 2
    path.unlink()
    os.mkfifo(path)
    assert main(["replay", str(path)]) == 2


def test_a_module_that_overflowed_in_a_watched_run_is_replayed(tmp_path, capsys):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, bias=False), nn.Conv1d(4, 2, 3, padding=1), Own())
    with torch.no_grad():
        model[1].weight.fill_(4500.0)
    nanny = MixedPrecisionNanny(model, output_dir=tmp_path, dump_on_error=True, strict=True)
    with nanny, nanny.step(0), torch.autocast("cpu", torch.float16):
        model(torch.full((4, 16), 30.0)).float().mean()
    (path,) = (tmp_path / "dumps").glob("step0_1_inputs.safetensors")
    assert f"run it again with: nanny replay {path}\n" in capsys.readouterr().err
    assert main(["replay", str(path)]) == 1
    out = capsys.readouterr().out
    assert "Linear [1] made Inf in float16 at step 0" in out
    assert "run again here: float16 [4, 16], 64 Inf" in out
    assert "in float64: float64 [4, 16], finite" in out
    assert "does not fit into float16, whose largest number is 65504" in out
    for change in ({"op": "os.path.Linear"}, {"op": "torch.nn.modules.container.Sequential"}, {"op": "ops.test_dumps.Own"}):
        edited(path, **change)
        assert main(["replay", str(path)]) == 1
        assert "runs no code that a dump names" in capsys.readouterr().out
    edited(path, op="torch.nn.modules.pooling.AvgPool1d", options={"kernel_size": {"tuple": [1]}, "stride": "x", "forward": "y"})
    assert main(["replay", str(path)]) == 1
    assert "does not run here" in capsys.readouterr().out
    edited(path, op="torch.nn.modules.pooling.AdaptiveAvgPool1d", options={"output_size": HUGE})
    assert main(["replay", str(path)]) == 1
    assert "GB are computed from a file" in capsys.readouterr().out


class Own(nn.Module):
    def forward(self, x):
        return x
