"""Workflow files call what is there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from .test_docs import ROOT, blocks_in

FLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = {*re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}


def commands(flow: dict[str, Any]) -> list[str]:
    return [step["run"] for job in flow["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", FLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_targets_and_scripts_that_exist(path: Path) -> None:
    flow = yaml.safe_load(path.read_text())
    assert flow["permissions"] == {"contents": "read"}
    for command in commands(flow):
        for target in re.findall(r"\bmake ([a-z-]+)", command):
            assert target in TARGETS
        for script in re.findall(r"(?:^|\s)(\.ci/\w+)", command):
            assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize("page", ["docs/before.md", "docs/before.zh-CN.md"])
def test_the_workflow_for_users_names_inputs_of_the_action(page: str) -> None:
    (text,) = blocks_in(page, "yaml")
    steps = yaml.safe_load(text)["jobs"]["nanny"]["steps"]
    inputs = yaml.safe_load((ROOT / "action.yml").read_text())["inputs"]
    assert set(steps[-1]["with"]) <= set(inputs)
