"""An agent that knows nothing but the server gets from a failed run to the line that broke it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters

TRAIN = """import torch
from torch import nn

from scoring import Scores


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.scores = Scores()
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.scores(self.encoder(x)))


torch.manual_seed(0)
model = Ranker()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for i in range(25):
    x = torch.randn(16, 8) * (1.0 + i)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), x[:, :1])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
SCORING = """import torch
from torch import nn


class Scores(nn.Module):
    def forward(self, x):
        x = x.half()
        return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)
"""
GUILTY = "scoring.py:8"


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("ranker").resolve()
    (root / "train.py").write_text(TRAIN)
    (root / "scoring.py").write_text(SCORING)
    run = [sys.executable, "-m", "nanny.cli", "run", "train.py"]
    done = subprocess.run(run, cwd=root, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return root


@pytest.mark.slow
def test_from_a_failed_run_to_the_guilty_line_with_the_server_alone(project):
    server = StdioServerParameters(command=sys.executable, args=["-m", "nanny.cli", "mcp", "--root", str(project)], cwd=project)

    async def agent() -> dict[str, Any]:
        async with Client(server) as client:

            async def ask(tool: str, **arguments: Any) -> dict[str, Any]:
                result = await client.call_tool(tool, arguments)
                assert not result.is_error, result.content
                return dict(result.structured_content)

            sick = next(row for row in (await ask("list_runs"))["runs"] if row["errors"])
            where = {"db": sick["db"], "run": sick["run"]}
            anomaly = await ask("first_anomaly", **where)
            diagnosis = (await ask("diagnose", **where))["diagnoses"][0]
            page = await ask("explain", name=diagnosis["cause"])
            file, _, line = diagnosis["where"].rpartition(":")
            code = await ask("check_code", path=file, device="cpu", amp_dtype="fp16")
            return {"anomaly": anomaly, "diagnosis": diagnosis, "page": page, "line": int(line), "file": file, "code": code}

    seen = anyio.run(agent)
    assert not seen["anomaly"]["healthy"]
    assert seen["diagnosis"]["cause"] == "exp_overflow_fp16"
    assert seen["diagnosis"]["culprit"] == "scores"
    assert seen["diagnosis"]["precision_caused"] is True
    assert f"{seen['file']}:{seen['line']}" == GUILTY
    assert "## Repaired" in seen["page"]["text"]
    assert any(f["line"] == seen["line"] for f in seen["code"]["findings"]), seen["code"]
