"""Every command that README, docs/ and SKILL.md show is run, in a folder that holds what they name."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import torch
from runs.query_recordings import SICK, nanny, record

from .test_docs import CHINESE, PAGES, ROOT, complaint, in_blocks, inline_code, words_of
from .test_schemas import CLIPPED

pytestmark = pytest.mark.slow

TRAIN = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    x = torch.randn(4, 8) * (1e30 if step == 2 else 1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
MODEL = "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))\n"
# what a page calls them, and what they are here
PLACES = {"/runs/17": "nanny_logs", "s3://bucket/runs": "bucket", "m.py:factory": "model.py:build", "s.pt": "sample.pt"}
WORDS = {"PATH": ["src"], "A": ["1"], "B": ["2"], "ARGS": [], "ARGS...": [], "fc.weight": ["head.softmax"]}
ELSEWHERE = {
    "mcp": "tests/agent starts it",
    "demo": "tests/cli/test_demo.py runs it",
    "ui": "tests/web starts it",
    "lsp": "tests/check",
}


def shown() -> dict[str, str]:
    """Each command once, with the page that shows it first."""
    found: dict[str, str] = {}
    for page in (page for page in PAGES if page not in CHINESE):
        commands = in_blocks(page)
        if page.endswith("SKILL.md"):
            commands += [code for code in inline_code(page) if code.startswith("nanny ")]
        for command in commands:
            words = words_of(command)
            if words[0] in ELSEWHERE or words in (["run"], ["trace"]) or complaint(words, whole=True):
                continue  # a name alone, as in "`nanny check --fix` mends"; test_docs.py asks the parser about all of them
            found.setdefault(command, page)
    return found


@pytest.fixture(scope="module")
def stage(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stage")
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "src").mkdir()
    for place in ("train.py", "src/train.py"):
        (folder / place).write_text(TRAIN)
    (folder / "src" / "clip.py").write_text(CLIPPED)
    (folder / "model.py").write_text(MODEL)
    torch.save(torch.randn(4, 8), folder / "sample.pt")
    torch.save({"layer1.weight": torch.randn(8, 8) * 1e-6}, folder / "grads.pt")
    space: dict[str, object] = {}
    exec(MODEL, space)
    torch.save(space["build"]().state_dict(), folder / "weights.pt")  # type: ignore[operator]
    for seed in range(3):
        record(folder / "nanny_logs", dataclasses.replace(SICK, seed=seed))
    for number in ("11", "12"):
        done = nanny("export", "--format", "parquet", "--db", "nanny_logs", "-o", "bucket", "--as", number, cwd=folder)
        assert done.returncode == 0, done.stderr
    done = nanny("trace", "--nan", "--dump", "--output-dir", "ops", "train.py", cwd=folder)
    assert list((folder / "ops").glob("*_inputs.safetensors")), done.stderr
    return folder


def test_there_are_commands_to_run():
    assert len(shown()) > 40
    assert {"skills/precision-nanny/SKILL.md", "README.md", "docs/scale.md"} <= {*shown().values()}


@pytest.mark.parametrize("command", shown())
def test_a_command_that_is_shown_works(command, stage, tmp_path):
    folder = shutil.copytree(stage, tmp_path / "stage")
    text = command
    for said, here in PLACES.items():
        text = re.sub(rf"(?<!\w){re.escape(said)}", here, text)  # "s.pt" is no end of "grads.pt"
    words = [word for part in words_of(text) for word in WORDS.get(part, [part])]
    if words[0] == "replay":
        words[1:] = [str(next((folder / "ops").glob("*_inputs.safetensors")))]
    words = [re.sub("^NAME$", "head.softmax" if words[0] == "layer" else "NAN", word) for word in words]
    done = nanny(*words, cwd=folder)
    said = done.stdout + done.stderr
    assert done.returncode in (0, 1), said
    assert "Traceback" not in said
    written = folder / words[words.index("-o") + 1] if "-o" in words else None
    assert done.stdout or words[0] in ("run", "trace") or (written is not None and written.exists())
