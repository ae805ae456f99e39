"""What commands give as JSON is what docs/schemas says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jsonschema
import pytest
import torch
from cli.test_flags import WITHOUT
from runs.query_recordings import HEALTHY, SICK, nanny, record

from nanny import cli

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "docs" / "schemas"
CLIPPED = """
import torch

def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""
SQUARES = """
from torch import nn

class Square(nn.Module):
    def forward(self, x):
        return x * x

model = nn.Sequential(nn.Linear(8, 8), Square(), nn.Linear(8, 8))
"""
TRAINED = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(2):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = (model(torch.randn(4, 8) * SCALE) * SCALE).square().mean()
    loss.backward()
    optimizer.step()
"""


def validated(name: str, text: str):
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    answer = json.loads(text)
    jsonschema.Draft202012Validator(schema).validate(answer)
    return answer


@pytest.fixture(scope="module", params=["sick", "healthy"])
def folder(request, tmp_path_factory):
    place = tmp_path_factory.mktemp(request.param)
    for seed in (0, 1):
        record(place / "nanny_logs", dataclasses.replace(SICK if request.param == "sick" else HEALTHY, seed=seed))
    return place


@pytest.mark.parametrize(
    "command",
    [
        "summary", "alerts", "diagnose", "stats", "runs", "runs --verify", "compare 1 2", "whatif --dtype fp16",
        "snapshot copy.db --force", "sql SELECT_1",
    ],
)  # fmt: skip
def test_what_is_said_of_a_run_follows_its_schema(folder, command):
    words = [word.replace("_", " ") for word in command.split()]
    validated(words[0], nanny(*words, "--format", "json", cwd=folder).stdout)


def test_what_is_said_of_a_layer_follows_its_schema(folder):
    kinds = json.loads(nanny("stats", "--format", "json", cwd=folder).stdout)["kinds"]
    layer = next(iter(kinds.values()))[0]["layer"]
    validated("layer", nanny("layer", layer, "--format", "json", cwd=folder).stdout)


@pytest.mark.landing
@pytest.mark.parametrize("words", [["rule", "SCALER"], ["rule", "update_lost"], ["doctor"]], ids=" ".join)
def test_what_is_said_of_nothing_but_nanny_follows_its_schema(words, tmp_path):
    validated(words[0], nanny(*words, "--format", "json", cwd=tmp_path).stdout)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 3000.0])
def test_what_is_said_of_tensors_models_and_operations_follows_its_schema(scale, tmp_path):
    torch.manual_seed(0)
    torch.save({"x": torch.randn(64, 8) * scale, "ids": torch.arange(5000.0)}, tmp_path / "t.pt")
    torch.save(torch.randn(4, 8) * scale, tmp_path / "x.pt")
    (tmp_path / "model.py").write_text(SQUARES)
    (tmp_path / "train.py").write_text(TRAINED.replace("SCALE", str(scale)))
    for words in (
        ["t.pt:x", "--dtype", "fp16", "--tile", "8"],
        ["t.pt:ids", "--dtype", "bf16"],
        ["t.pt:x", "--dtype", "fp8_e4m3"],
    ):
        validated("tensor", nanny("tensor", *words, "--format", "json", cwd=tmp_path).stdout)
    for more in ([], ["--advise", "0.0001"]):
        words = ["--model", "model.py", "--input", "x.pt", "--dtype", "fp16", *more]
        validated("diff", nanny("diff", *words, "--format", "json", cwd=tmp_path).stdout)
    for tool in ("--nan", "--compare", "--sanitize"):
        validated("trace", nanny("trace", tool, "--dump", "--format", "json", "train.py", cwd=tmp_path).stdout)
    for dump in (tmp_path / "nanny_logs" / "ops").glob("*_inputs.safetensors"):
        validated("replay", nanny("replay", dump, "--format", "json", cwd=tmp_path).stdout)


def test_every_answer_in_json_has_a_schema_and_every_schema_a_command():
    answers = {name for name in cli.COMMANDS if name not in WITHOUT["--format"]}
    assert {path.stem for path in SCHEMAS.glob("*.json")} == answers - {"tail"}  # tail: a line for each step, as it comes


def test_what_is_said_of_source_follows_its_schema(tmp_path):
    (tmp_path / "train.py").write_text(CLIPPED)
    found = validated("check", nanny("check", "train.py", "--format", "json", cwd=tmp_path).stdout)
    assert [finding["code"] for finding in found] == ["SCALER_CLIP_BEFORE_UNSCALE"]


def test_a_key_that_is_not_in_the_schema_is_noticed():
    schema = json.loads((SCHEMAS / "diagnose.json").read_text())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate([{"cause": "x", "unknown": 1}])
