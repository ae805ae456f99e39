"""Training scripts as users write them, under `nanny run`; expected.json says what is to be said.

They were written without sight of the engine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nanny

HERE = Path(__file__).parent
EXPECTED: list[dict[str, Any]] = json.loads((HERE / "expected.json").read_text())


def said_of(file: str, folder: Path) -> dict[str, Any]:
    """The diagnosis of a script, {} if there is none."""
    shutil.copy(HERE / "programs" / file, folder)
    environment = {**os.environ, "PYTHONPATH": str(Path(nanny.__file__).parents[1]), "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "nanny", *words]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600).stdout

    run("run", file)
    found: dict[str, Any] = json.loads(run("summary", "--format", "json"))["diagnosis"] or {}
    return found
