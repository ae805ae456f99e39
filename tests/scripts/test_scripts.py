"""Training scripts as users write them, with a planted fault or none, under `nanny run`; expected.json says what is to be said.

They were written without sight of the engine. WRONG lists what is not said yet: such a test must fail, and once it passes its
line has to go.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nanny

HERE = Path(__file__).parent
EXPECTED: list[dict[str, Any]] = json.loads((HERE / "expected.json").read_text())
WRONG = {
    "policy_logprobs.py": "a probability that fp16 rounds to 0 under a logarithm: told as a derivative that FP32 has not either",
    "ema_teacher_bf16.py": "an average of weights in bf16 that moves too slowly: nothing is said",
    "class_balance_counts.py": "a counter in a bf16 buffer that stops at 256: nothing is said",
    "pressure_targets.py": "targets rounded by their data set before the loop: nothing is said",
    "contrastive_pairs.py": "a part that runs without gradients at one step, and was there before: nothing is said",
    "distill_codes.py": "a teacher whose choices are rounded: nothing is said",
}


def _case(about: dict[str, Any]) -> Any:
    why = WRONG.get(about["file"])
    marks = [pytest.mark.slow] + ([pytest.mark.xfail(strict=True, reason=why)] if why else [])
    return pytest.param(about, id=about["file"], marks=marks)


@pytest.mark.parametrize("about", [_case(about) for about in EXPECTED])
def test_the_cause_is_named_or_nothing(about: dict[str, Any], tmp_path: Path) -> None:
    shutil.copy(HERE / "programs" / about["file"], tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(Path(nanny.__file__).parents[1]), "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "nanny", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600).stdout

    run("run", about["file"])
    found = json.loads(run("summary", "--format", "json"))["diagnosis"] or {}
    if about["healthy"]:
        assert found == {}
    else:
        assert found.get("cause") in about["cause"]


def test_expectations_are_of_programs() -> None:
    assert {about["file"] for about in EXPECTED} == {path.name for path in (HERE / "programs").glob("*.py")}
    assert set(WRONG) <= {about["file"] for about in EXPECTED}
