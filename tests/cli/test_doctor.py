"""`nanny doctor` on this machine, without torch, and with a torch that does not load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nanny
from nanny.cli import doctor

SOURCE = Path(nanny.__file__).parents[1]


def run_doctor(*args: str, python: str = sys.executable, path: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": path} if path else None
    return subprocess.run([python, "-m", "nanny.cli", "doctor", *args], capture_output=True, text=True, timeout=120, env=env)


@pytest.fixture(scope="module")
def report():
    done = run_doctor("--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def bare_python(tmp_path):
    """An interpreter that has nothing but the standard library."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=60)
    return str(tmp_path / "bare" / "bin" / "python")


@pytest.mark.landing
def test_versions_are_those_in_use(report):
    assert report["nanny"] == nanny.__version__
    assert report["torch"]["version"] == report["packages"]["torch"] == torch.__version__
    assert report["problems"] == []


def test_autocast_is_tried_on_every_device(report):
    devices = {d["device"]: d["autocast"] for d in report["torch"]["devices"]}
    assert set(devices["cpu"]) == {"float16", "bfloat16"}
    for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        with torch.autocast("cpu", dtype=dtype):
            works = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
        assert (devices["cpu"][name] == "yes") == works


def test_autocast_to_a_type_that_cpu_refuses_is_told_as_such():
    with pytest.warns(UserWarning, match="not supported"):
        assert doctor._try_autocast("cpu", torch.float64) == "no: the product is float32"


@pytest.mark.slow
def test_text_names_the_device_the_store_and_every_extra():
    text = run_doctor().stdout
    assert "cpu" in text
    assert "autocast bfloat16:" in text
    assert "SQLite" in text
    assert all(f"  {extra.name} " in text for extra in doctor.EXTRAS)


def test_extras_are_those_of_the_distribution():
    from importlib.metadata import metadata

    groups = {"all", "dev", "gallery", "site", "trackers"}  # for many commands at once, or for tests
    assert {e.name for e in doctor.EXTRAS} == set(metadata("precision-nanny").get_all("Provides-Extra")) - groups


def test_a_missing_extra_comes_with_the_line_to_type():
    extra = doctor.Extra("export", ("no_such_package", "json"), "export", "files for others")
    examined = doctor.examine_extra(extra)
    assert (examined["missing"], list(examined["installed"])) == (["no_such_package"], ["json"])
    (first, second) = doctor._extra_lines([examined])
    assert "no_such_package missing for nanny export: files for others" in first
    assert second.strip() == "to get it: pip install 'precision-nanny[export]'"


def test_without_torch_the_doctor_still_reports_and_says_what_to_install(bare_python):
    done = run_doctor(python=bare_python, path=str(SOURCE))
    assert done.returncode == 1
    assert "WRONG: torch is not installed; to repair: pip install torch" in done.stdout
    assert "WRONG: numpy is not installed" in done.stdout
    assert "SQLite" in done.stdout
    assert done.stderr == ""


def test_a_torch_that_does_not_load_is_a_line_of_the_report(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')\n")
    done = run_doctor(path=str(tmp_path))
    assert done.returncode == 1
    assert "torch is installed but does not work: OSError: libtorch_cpu.so: cannot open shared object file" in done.stdout


def test_a_torch_that_kills_its_process_does_not_kill_the_doctor(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os; os.abort()\n")
    done = run_doctor("--format", "json", path=str(tmp_path))
    assert done.returncode == 1
    assert json.loads(done.stdout)["torch"] == {"error": "the process died of signal 6"}


def test_an_unknown_option_is_a_usage_error():
    assert run_doctor("--frmat", "json").returncode == 2
