"""The examples do what their first lines promise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from runs.query_recordings import nanny

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_unscaled_attention_is_diagnosed_down_to_its_line(tmp_path):
    script = shutil.copy(EXAMPLES / "unscaled_attention.py", tmp_path)
    assert nanny("run", script, cwd=tmp_path).returncode == 0
    answer = nanny("diagnose", "--format", "json", cwd=tmp_path)
    first = json.loads(answer.stdout)[0]
    line = 1 + Path(script).read_text().splitlines().index("        scores = q @ k.transpose(-1, -2)")
    assert first["cause"] == "attention_logit_overflow_fp16"
    assert first["culprit"] in ("blocks.0.attn", "blocks.1.attn", "blocks.2.attn")
    assert first["where"].endswith(f"unscaled_attention.py:{line}")
    assert first["precision_caused"] is True
