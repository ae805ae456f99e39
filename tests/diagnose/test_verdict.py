"""One verdict: whatever asks about a run gets the same answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs.query_recordings import HEALTHY, SICK, record
from torch import nn

from nanny import Finding, MixedPrecisionNanny, Severity
from nanny.cli import main as command
from nanny.diagnose import verdict as verdicts
from nanny.diagnose.evidence import Evidence, RunFacts
from nanny.diagnose.records import Diagnosis
from nanny.diagnose.verdict import Verdict, finding_of, verdict_of
from nanny.runs.opening import open_job
from nanny.runs.summary import summarize

CAUSE = Diagnosis(
    "norm_square_overflow_fp16", culprit="norm", step=3, where="train.py:7", confidence=0.95, evidence=("65,600",), remedy="FP32"
)
ERROR = Finding("NAN", Severity.ERROR, "NaN", site="head", step=9)


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets the engine find this diagnosis, whatever the run."""

    def set_diagnosis(*found: Diagnosis) -> None:
        monkeypatch.setattr(verdicts, "diagnoses_of", lambda evidence: list(found))

    return set_diagnosis


def test_a_cause_is_the_verdict_even_without_a_finding(says: Any) -> None:
    says(CAUSE)
    verdict = verdict_of(Evidence(RunFacts()), steps=(0, 9))
    assert (verdict.healthy, verdict.word) == (False, "NOT HEALTHY")
    assert verdict.text == "NOT HEALTHY: norm_square_overflow_fp16 in norm at step 3 (train.py:7), 95 % sure"


@pytest.mark.parametrize("change", [{"confidence": 0.6}, {"early": True, "expected_step": 80}])
def test_what_is_not_proved_is_suspected(says: Any, change: dict[str, Any]) -> None:
    says(replace(CAUSE, **change))
    verdict = verdict_of(Evidence(RunFacts()), steps=(0, 9))
    assert (verdict.healthy, verdict.word) == (False, "SUSPECT")
    assert "suspected, 60 %" in verdict.text or "expected to fail around step 80" in verdict.text


def test_findings_without_a_cause_are_not_healthy(says: Any) -> None:
    says()
    verdict = verdict_of(Evidence(RunFacts(), findings=(ERROR,)), steps=(0, 9))
    assert verdict.unproved
    assert verdict.text == "NOT HEALTHY: 1 error; no cause is proved by what was seen"
    loss = {"loss": (np.array([0, 1]), np.array([1.0, np.nan]))}
    assert verdict_of(Evidence(RunFacts(), scalars=loss), steps=(0, 1)).unproved


@pytest.mark.parametrize(("status", "word"), [("finished", "HEALTHY"), ("crashed", "CRASHED"), ("interrupted", "INTERRUPTED")])
def test_how_a_clean_run_ended_is_said(says: Any, status: str, word: str) -> None:
    says()
    assert verdict_of(Evidence(RunFacts()), steps=(0, 9), status=status).word == word


def test_the_cause_is_one_of_the_findings() -> None:
    found = finding_of(Verdict(False, "NOT HEALTHY", "", CAUSE, ERROR))
    assert found is not None
    assert (found.code, found.severity, found.site, found.step) == (CAUSE.cause, Severity.ERROR, "norm", 3)
    assert (found.file, found.line, found.hint) == ("train.py", 7, "FP32")
    silent = finding_of(Verdict(False, "NOT HEALTHY", "", CAUSE))
    assert silent is not None
    assert silent.severity is Severity.ERROR, "as bad as the verdict says, although no rule has found anything"


def _ask(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = command(list(words))
    return code, capsys.readouterr().out


@pytest.mark.parametrize(("recipe", "healthy"), [(HEALTHY, True), (SICK, False), (replace(HEALTHY, loss_is_nan_from=30), False)])
def test_every_command_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: Any, healthy: bool) -> None:
    db = str(record(tmp_path, recipe))
    with open_job(db, None) as (sources, _):
        verdict = summarize(sources).verdict
    assert verdict.healthy is healthy
    assert _ask(capsys, "summary", "--db", db)[1].startswith(verdict.word)
    assert json.loads(_ask(capsys, "summary", "--db", db, "--format", "json")[1])["healthy"] is healthy
    code, said = _ask(capsys, "diagnose", "--db", db)
    assert (code == 0) is healthy
    assert verdict.diagnosis is not None or verdict.word in said
    for severity in ("error", "warning"):
        assert (_ask(capsys, "alerts", "--fail-on", severity, "--db", db)[0] == 0) is healthy
    assert _ask(capsys, "alerts", "--fail-on", "error", "--step", "0:1", "--db", db)[0] == 0, "of what is asked about alone"


def test_the_live_verdict_is_the_recorded_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    nanny = MixedPrecisionNanny(model, optimizer, output_dir=tmp_path, trace_interval=1)
    for step in range(6):
        with nanny.step(step):
            x = torch.ones(2, 4)
            model(x / (0 if step == 3 else 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    nanny.close()
    closing = capsys.readouterr().err
    with open_job(str(tmp_path), None) as (sources, _):
        verdict = summarize(sources).verdict
    live = nanny.verdict("finished")
    assert (live.text, live.diagnosis, live.first) == (verdict.text, verdict.diagnosis, verdict.first)
    assert verdict.healthy is False
    assert f"nanny: {verdict.text}" in closing
