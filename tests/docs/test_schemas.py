"""What commands give as JSON is what docs/schemas says."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from runs.query_recordings import HEALTHY, SICK, nanny, record

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


def validated(name: str, text: str):
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    answer = json.loads(text)
    jsonschema.Draft202012Validator(schema).validate(answer)
    return answer


@pytest.fixture(scope="module", params=["sick", "healthy"])
def folder(request, tmp_path_factory):
    place = tmp_path_factory.mktemp(request.param)
    record(place / "nanny_logs", SICK if request.param == "sick" else HEALTHY)
    return place


@pytest.mark.parametrize("command", ["summary", "alerts", "diagnose"])
def test_what_is_said_of_a_run_follows_its_schema(folder, command):
    validated(command, nanny(command, "--format", "json", cwd=folder).stdout)


def test_what_is_said_of_source_follows_its_schema(tmp_path):
    (tmp_path / "train.py").write_text(CLIPPED)
    found = validated("check", nanny("check", "train.py", "--format", "json", cwd=tmp_path).stdout)
    assert [finding["code"] for finding in found] == ["SCALER_CLIP_BEFORE_UNSCALE"]


def test_a_key_that_is_not_in_the_schema_is_noticed():
    schema = json.loads((SCHEMAS / "diagnose.json").read_text())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate([{"cause": "x", "unknown": 1}])
