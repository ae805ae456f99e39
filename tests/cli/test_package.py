"""What a user meets first: importing the package, the command, its exit codes, and the records that everything speaks in."""

from __future__ import annotations

import json
import pkgutil
import re
import subprocess
import sys
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path

import pytest

import nanny
from nanny import cli
from nanny.core.finding import Finding, NannyError, Severity
from nanny.core.limits import Limits, describe
from nanny.core.step import Sample

HEAVY = ("torch", "numpy", "safetensors", "plotly", "matplotlib", "mcp")
# Nothing of these may cost more than a moment to import: they serve the checker, the queries and the shell.
LIGHT = ["nanny", "nanny.core.finding", "nanny.core.step", "nanny.core.limits", "nanny.core.formats", "nanny.cli"]


def python(*args: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=timeout)


def loaded_by(statement: str) -> set[str]:
    done = python("-c", f"{statement}\nimport sys\nprint()\nprint(*sorted(m for m in {HEAVY!r} if m in sys.modules))")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rsplit("\n", 2)[1].split())


def test_importing_nanny_loads_neither_torch_nor_numpy():
    assert loaded_by("import nanny; dir(nanny); nanny.__version__; nanny.Finding; nanny.NannyError") == set()


def test_the_shared_core_loads_neither_torch_nor_numpy():
    assert loaded_by("import " + ", ".join(LIGHT)) == set()


@pytest.mark.quick(2)
@pytest.mark.parametrize("folder", ["core", "store", "diagnose", "runs", "show", "check", "web", "agent"])
def test_whatever_works_on_stored_records_does_not_load_torch(folder):
    package = pytest.importorskip(f"nanny.{folder}")
    modules = [m.name for m in pkgutil.walk_packages(package.__path__, f"nanny.{folder}.") if "__main__" not in m.name]
    assert modules
    assert "torch" not in loaded_by("import " + ", ".join(modules))


def test_a_public_name_is_the_one_of_its_home_module():
    from nanny.core import finding

    assert nanny.Finding is finding.Finding
    assert nanny.NannyError is finding.NannyError
    assert {"analyze_tensor", "MixedPrecisionNanny", "check_model"} <= set(dir(nanny)) == set(nanny.__all__)


def test_every_public_name_resolves():
    for name in nanny.__all__:
        assert getattr(nanny, name) is not None, name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'analyse_tensor'"):
        nanny.analyse_tensor  # noqa: B018


# ---- the command ----


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"]])
def test_help_lists_every_command_and_succeeds(argv, capsys):
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in cli.COMMANDS)


def test_without_a_command_the_usage_is_shown_and_the_exit_code_says_so(capsys):
    assert cli.main([]) == 2
    assert "usage: nanny" in capsys.readouterr().out


def test_module_form_answers_like_the_command():
    done = python("-m", "nanny.cli", "--version")
    assert (done.returncode, done.stdout) == (0, f"nanny {nanny.__version__}\n")


def test_installed_command_answers():
    done = subprocess.run([Path(sys.executable).with_name("nanny"), "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: nanny")


def test_installed_version_is_the_one_of_the_package():
    assert version("precision-nanny") == nanny.__version__


def test_unknown_command_is_one_sentence_on_stderr_and_exit_code_2():
    done = python("-m", "nanny.cli", "tenso")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "nanny: there is no command 'tenso', did you mean 'tensor'? type `nanny --help` for the list\n"


def test_help_does_not_load_torch():
    assert loaded_by("from nanny import cli; cli.main(['--help'])") == set()


def test_what_the_other_tests_call_heavy_is_noticed_when_loaded():
    assert loaded_by("import numpy") == {"numpy"}


def test_a_reader_that_hangs_up_is_no_error():
    script = f"{sys.executable} -m nanny.cli --help | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_database_may_stand_before_the_command_in_both_spellings():
    assert cli.split_db(["--db", "a.db", "summary", "--run", "2"]) == (["--db", "a.db"], ["summary", "--run", "2"])
    assert cli.split_db(["--db=a.db", "summary"]) == (["--db=a.db"], ["summary"])
    assert cli.split_db(["summary", "--db", "a.db"]) == ([], ["summary", "--db", "a.db"])


@pytest.mark.parametrize("argv", ["--db no/such.db summary", "summary --db no/such.db", "--db=no/such.db summary"])
def test_a_database_before_or_after_the_command_is_the_same_database(argv, capsys):
    assert cli.main(argv.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no/such.db" in captured.err


@pytest.mark.parametrize("argv", [["--db"], ["--db", "a.db"]])
def test_a_database_without_a_command_shows_the_usage(argv, capsys):
    assert cli.main(argv) == 2
    assert "usage: nanny" in capsys.readouterr().out


def test_a_database_makes_no_sense_for_a_command_that_reads_no_run(capsys):
    assert cli.main(["--db", "a.db", "doctor"]) == 2
    assert "`nanny doctor` reads no run" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as ended:
        sys.exit(cli.main([name, "--help"]))
    assert ended.value.code in (0, None)
    usage, _, rest = capsys.readouterr().out.partition("\n\n")
    assert usage.lower().startswith("usage")
    assert re.search(rf"^ *nanny {name}\b", rest, re.MULTILINE), "no example"


# ---- records ----


def test_a_finding_survives_json():
    finding = Finding(
        code="OVERFLOW", severity=Severity.ERROR, message="m", hint="h", site="blocks.1", step=0, rank=0,
        file="a.py", line=3, value=0.0, limit=65504.0, evidence={"share": 0.25},
    )  # fmt: skip
    back = json.loads(json.dumps(finding.to_json()))
    assert back["severity"] == "ERROR"
    assert back["step"] == back["rank"] == back["value"] == 0  # zero says something
    assert Finding(**{**back, "severity": Severity[back["severity"]]}) == finding


def test_fields_that_say_nothing_are_left_out():
    out = Finding("NAN", Severity.INFO, "m").to_json()
    assert out == {"code": "NAN", "severity": "INFO", "message": "m"}


@pytest.mark.parametrize(
    ("place", "where"),
    [
        ({"file": "m.py", "line": 12}, "m.py:12"),
        ({"file": "m.py"}, "m.py"),
        ({"site": "blocks.1"}, "blocks.1"),
        ({"file": "m.py", "line": 12, "site": "blocks.1"}, "m.py:12"),
        ({}, ""),
    ],
)
def test_where_names_the_line_before_the_site(place, where):
    assert Finding("X", Severity.INFO, "m", **place).where == where


def test_severities_are_ordered_and_parsed_in_any_case():
    assert Severity.INFO < Severity.WARNING < Severity.ERROR
    assert [Severity.parse(t) for t in ("error", " Warning ", "INFO")] == [Severity.ERROR, Severity.WARNING, Severity.INFO]
    with pytest.raises(NannyError, match="use one of: info, warning, error"):
        Severity.parse("fatal")


def test_a_sample_knows_how_many_sites_it_holds():
    assert Sample("grad", 1, ("count", "norm"), bytes(4 * 2 * 5)).sites == 5
    assert Sample("grad", 1, (), b"").sites == 0


# ---- limits ----


def test_every_limit_has_a_source_and_every_changed_one_a_reason():
    for entry in describe():
        assert entry["source"], entry["name"]
        assert isinstance(entry["value"], (int, float)), entry["name"]
        assert entry["why"], entry["name"]


def test_description_holds_each_limit_once_with_the_value_in_force():
    assert {e["name"]: e["value"] for e in describe()} == {f.name: getattr(Limits(), f.name) for f in fields(Limits)}


def test_one_limit_can_be_changed_without_touching_the_others():
    changed = replace(Limits(), grad_zscore=9.0)
    assert changed.grad_zscore == 9.0
    assert replace(changed, grad_zscore=Limits().grad_zscore) == Limits()
