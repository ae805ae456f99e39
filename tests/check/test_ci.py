"""The GitHub Action and the pre-commit hooks: what they run is what the command line takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nanny.check.command import _parser

ROOT = Path(__file__).parents[2]
BAD = "import torch\n\n\ndef f(x, m):\n    h = x.half()\n    return h.masked_fill(m, -1e9)\n"


def test_hooks_call_the_command_with_options_that_it_has():
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert [hook["id"] for hook in hooks] == ["nanny-check", "nanny-fix"]
    for hook in hooks:
        name, command, *options = hook["entry"].split()
        assert (name, command) == ("nanny", "check")
        _parser().parse_args([*options, "train.py"])
    own = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert any(hook["id"] == "nanny-check" for hook in own)


def test_this_repository_uses_its_own_action():
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "nanny.yml").read_text())
    step = next(s for s in flow["jobs"]["check"]["steps"] if s.get("uses") == "./")
    inputs = yaml.safe_load((ROOT / "action.yml").read_text())["inputs"]
    assert set(step["with"]) <= set(inputs)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "code"), [(BAD, "1"), ("import torch\n", "0")])
def test_the_action_writes_sarif_and_hands_the_verdict_on(tmp_path, text, code):
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    step = next(s for s in action["runs"]["steps"] if s.get("id") == "check")
    assert set(step["env"]) == {"PATHS", "ARGS", "SARIF"}, "inputs come as variables, never as text of the script"
    (tmp_path / "train.py").write_text(text)
    outputs = tmp_path / "outputs"
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PATHS": "train.py",
        "ARGS": "--device cuda",
        "SARIF": "out.sarif",
        "GITHUB_OUTPUT": str(outputs),
    }
    done = subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert outputs.read_text() == f"exit-code={code}\n"
    results = json.loads((tmp_path / "out.sarif").read_text())["runs"][0]["results"]
    assert bool(results) == (code == "1")
