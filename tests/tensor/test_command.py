"""`nanny tensor` on real files: exit codes, output, and one clear sentence for every kind of bad input."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nanny import NannyError, analyze_tensor
from nanny.cli import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *argv):
    code = main(["tensor", *map(str, argv)])
    out = capsys.readouterr()
    return code, out.out, out.err


def assert_refused(capsys, said, *argv):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("nanny: ")
    assert err.count("\n") == 1
    assert said in err
    assert "Traceback" not in err


def healthy():
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.npy", "x.safetensors", "odd:name.pt"])
def test_a_healthy_tensor_in_any_kind_of_file_exits_0(folder, capsys, name):
    if name.endswith(".npy"):
        np.save(name, healthy().numpy())
    elif name.endswith(".safetensors"):
        save_file({"w": healthy()}, name)
    else:
        torch.save(healthy(), name)
    code, out, err = run(capsys, name, "--dtype", "fp16")
    assert (code, err) == (0, "")
    assert "float32 32 x 16, healthy in fp16" in out


def test_a_sick_tensor_exits_1_and_a_remark_does_not(folder, capsys):
    torch.save({"sick": torch.tensor([1.0, 70_000.0]), "remark": torch.tensor([1.5, 10_000.0])}, "x.pt")
    assert run(capsys, "x.pt:sick", "--dtype", "fp16")[0] == 1
    code, out, _ = run(capsys, "x.pt:remark", "--dtype", "fp16")
    assert code == 0
    assert "healthy in fp16, 1 remark" in out


def test_keys_reach_into_nested_dictionaries_and_lists(folder, capsys):
    torch.save({"model": {"layer.0.weight": healthy()}, "state": [{"exp_avg": healthy() * 1e-9}], "epoch": 3}, "c.pt")
    assert run(capsys, "c.pt:model.layer.0.weight")[0] == 0
    code, out, _ = run(capsys, "c.pt:state.0.exp_avg", "--dtype", "fp16")
    assert code == 1
    assert out.startswith("state.0.exp_avg: float32 32 x 16, not safe in fp16")


def test_safetensors_of_low_precision_are_read(folder, capsys):
    save_file({"a": healthy().bfloat16(), "b": healthy().to(torch.float8_e4m3fn)}, "x.safetensors")
    assert "bfloat16 32 x 16" in run(capsys, "x.safetensors:a")[1]
    assert "float8_e4m3fn 32 x 16" in run(capsys, "x.safetensors:b")[1]


@pytest.mark.parametrize("array", [np.ones((3, 4), ">f4"), np.ones((3, 4), "f2"), np.asfortranarray(np.ones((3, 4)))])
def test_numpy_arrays_of_any_byte_order_and_layout_are_read(folder, capsys, array):
    np.save("x.npy", array)
    code, out, _ = run(capsys, "x.npy")
    assert code == 0
    assert "3 x 4" in out


def test_json_is_the_report(folder, capsys):
    torch.save(healthy(), "x.pt")
    code, out, _ = run(capsys, "x.pt", "--dtype", "fp8_e5m2", "--dim", "1", "--tile", "16", "--format", "json")
    data = json.loads(out)
    assert code == 0
    assert data == analyze_tensor(healthy(), "fp8_e5m2", dims=1, tile=16, name="x.pt").to_json()
    assert [d["dim"] for d in data["dimensions"]] == [1]
    assert data["tiles"]["count"] == 2


BAD_TENSORS = {
    "integers": (torch.arange(4), "int64"),
    "bools": (torch.ones(3, dtype=torch.bool), "bool"),
    "complex": (torch.ones(3, dtype=torch.complex64), "view_as_real"),
    "sparse": (torch.eye(3).to_sparse(), "to_dense"),
    "compressed sparse": (torch.eye(3).to_sparse_csr(), "to_dense"),
    "quantized": (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "dequantize"),
    "meta": (torch.empty(3, device="meta"), "holds no values"),
    "empty": (torch.empty(0, 3), "empty"),
    "all NaN": (torch.full((4,), float("nan")), "nothing to measure"),
    "all infinite": (torch.full((4,), float("inf")), "nothing to measure"),
}


@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning")
@pytest.mark.parametrize("kind", BAD_TENSORS)
def test_tensors_that_cannot_be_measured_are_refused_in_one_sentence(folder, capsys, kind):
    tensor, said = BAD_TENSORS[kind]
    with pytest.raises(NannyError, match=said):
        analyze_tensor(tensor)
    torch.save(tensor, "x.pt")
    assert_refused(capsys, said, "x.pt")


class Evil:
    def __reduce__(self):
        return (open, ("pwned", "w"))


def test_a_file_that_would_run_code_is_refused_and_nothing_runs(folder, capsys):
    torch.save({"x": healthy(), "evil": Evil()}, "evil.pt")
    assert_refused(capsys, "would run code", "evil.pt:x")
    np.save("evil.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    assert_refused(capsys, "would run code", "evil.npy")
    assert not (folder / "pwned").exists()


def test_a_whole_pickled_model_is_refused_with_what_to_save_instead(folder, capsys):
    torch.save(torch.nn.Linear(2, 2), "model.pt")
    assert_refused(capsys, "torch.save(model.state_dict(), path)", "model.pt")


@pytest.mark.parametrize("suffix", [".pt", ".npy", ".safetensors"])
@pytest.mark.parametrize("how", ["empty", "garbage", "cut short", "of zeros"])
def test_damaged_files_are_refused(folder, capsys, suffix, how):
    buffer = io.BytesIO()
    if suffix == ".pt":
        torch.save(healthy(), buffer)
    elif suffix == ".npy":
        np.save(buffer, healthy().numpy())
    else:
        save_file({"w": healthy()}, "whole.safetensors")
        buffer.write((folder / "whole.safetensors").read_bytes())
    whole = buffer.getvalue()
    half = whole[: len(whole) // 2]
    content = {"empty": b"", "garbage": b"this is no tensor at all" * 9, "cut short": half, "of zeros": bytes(500)}
    (folder / f"bad{suffix}").write_bytes(content[how])
    assert_refused(capsys, "damaged", f"bad{suffix}")


@pytest.mark.parametrize("at", range(0, 100, 9))
def test_a_pt_cut_anywhere_is_refused(folder, capsys, at):
    buffer = io.BytesIO()
    torch.save({"a": healthy()}, buffer, _use_new_zipfile_serialization=at % 2 == 0)
    content = buffer.getvalue()
    (folder / "bad.pt").write_bytes(content[: len(content) * at // 100])
    assert_refused(capsys, "bad.pt: ", "bad.pt")


def test_wrong_arguments_are_refused_with_what_to_type(folder, capsys):
    torch.save({"encoder.weight": healthy(), "decoder.weight": healthy()}, "m.pt")
    torch.save(healthy(), "x.pt")
    torch.save({"lr": 0.1}, "empty.pt")
    np.save("x.npy", np.ones(3))
    np.save("text.npy", np.array(["a", "b"]))
    (folder / "notes.txt").write_text("hello")
    (folder / "dir.pt").mkdir()
    assert_refused(capsys, "there is no such file", "nowhere.pt")
    assert_refused(capsys, "there is no such file", "nowhere.pt:key")
    assert_refused(capsys, "KEY one of: encoder.weight, decoder.weight", "m.pt")
    assert_refused(capsys, "did you mean encoder.weight", "m.pt:encoder.wieght")
    assert_refused(capsys, "it has: encoder.weight, decoder.weight", "m.pt:zzz")
    assert_refused(capsys, "without keys", "x.pt:w")
    assert_refused(capsys, "without keys", "x.npy:w")
    assert_refused(capsys, "holds no tensor", "empty.pt")
    assert_refused(capsys, "unknown kind of file", "notes.txt")
    assert_refused(capsys, "this is a folder", "dir.pt")
    assert_refused(capsys, "save it as float32", "text.npy")
    assert_refused(capsys, "there is no dimension 2; the tensor has dimensions 0 to 1", "x.pt", "--dim", "2")
    assert_refused(capsys, "there is no dimension -3", "x.pt", "--dim", "-3")
    assert_refused(capsys, "tile 0 is not a tile size", "x.pt", "--tile", "0")
    assert_refused(capsys, "tile 3 is not a tile size", "x.pt", "--tile", "3")
    assert_refused(capsys, "invalid choice: 'fp32'", "x.pt", "--dtype", "fp32")
    assert_refused(capsys, "required: FILE", "--dtype", "fp16")
    assert sorted(p.name for p in folder.iterdir()) == ["dir.pt", "empty.pt", "m.pt", "notes.txt", "text.npy", "x.npy", "x.pt"]


def test_wrong_python_arguments_are_refused():
    x = healthy()
    for bad in ({"dims": 5}, {"dims": "x"}, {"tile": -1}, {"tile": (2, 2, 2)}, {"tile": 1.5}):
        with pytest.raises(NannyError):
            analyze_tensor(x, **bad)
    with pytest.raises(NannyError, match="low-precision target"):
        analyze_tensor(x, torch.float32)
    with pytest.raises(NannyError, match="unknown floating-point format"):
        analyze_tensor(x, torch.int8)
    with pytest.raises(NannyError, match="needs a torch tensor, not ndarray"):
        analyze_tensor(x.numpy())
    with pytest.raises(NannyError, match="has none"):
        analyze_tensor(torch.tensor(1.0), dims=0)


def test_help_does_not_load_torch():
    run = "import sys, nanny.tensor.command as t\ntry: t.main(['--help'])\nexcept SystemExit: pass\n"
    script = f"{run}assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0


@pytest.mark.slow
def test_the_module_runs_alone_and_survives_an_ascii_terminal(folder):
    torch.save(torch.tensor([1.0, 70_000.0]), "x.pt")
    command = [sys.executable, "-m", "nanny", "tensor", "x.pt", "--dtype", "fp16"]
    done = subprocess.run(command, capture_output=True, env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin"})
    assert done.returncode == 1, done.stderr
    assert b"CAST_OVERFLOW" in done.stdout


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8_e4m3"])
def test_the_text_fits_into_a_hundred_columns(folder, capsys, dtype):
    torch.save(torch.randn(64, 32) * torch.logspace(-6, 4, 32), "wide.pt")
    main(["tensor", "wide.pt", "--dtype", dtype, "--tile", "8"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("tiles") for line in lines)
    assert [line for line in lines if len(line) > 100] == []
