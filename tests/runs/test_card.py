"""What the picture of a run draws: the culprit itself, of the kind that the finding speaks of."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from nanny.core.finding import Finding, Severity
from nanny.runs.card import card_svg
from nanny.runs.opening import open_job
from nanny.runs.summary import summarize
from nanny.runs.wall import wall_of
from runs.query_recordings import SICK, nanny, record

EXAMPLES = Path(__file__).parents[2] / "examples"

FADED = Finding("GRAD_VANISH", Severity.WARNING, "gradient norm 2.9e-5", "use a GradScaler", site="head.out.weight", step=20)
SMALL = Finding(
    "UNDERFLOW", Severity.WARNING, "6.1e-5", "raise the scale", site="body.0", step=20, evidence={"kind": "output_grad"}
)


@pytest.mark.parametrize(
    ("finding", "kind", "site"),
    [(FADED, "grad", "head.out.weight"), (SMALL, "output_grad", "body.0")],
    ids=["parameter", "module"],
)
def test_a_finding_about_gradients_draws_gradients_of_its_own_place(finding, kind, site, tmp_path: Path):
    record(tmp_path, replace(SICK, findings=(finding,), nan_output=None, loss_is_nan_from=None))
    with open_job(str(tmp_path), None) as (sources, notes):
        summary = summarize(sources, notes)
        wall, card = wall_of(summary), card_svg(summary)
    assert (wall.kind, wall.site, wall.impact) == (kind, site, 20)
    assert {words for words in (finding.code, "step 20", finding.message, finding.hint) if words not in card} == set()


def test_without_a_line_to_show_the_card_says_what_proves_the_cause(tmp_path: Path):
    (tmp_path / "train.py").write_text((EXAMPLES / "lost_updates.py").read_text())
    assert nanny("run", "train.py", cwd=tmp_path).returncode == 0
    with open_job(str(tmp_path / "nanny_logs"), None) as (sources, notes):
        summary = summarize(sources, notes)
        card = " ".join(re.findall(r">([^<>]+)</text>", card_svg(summary)))
    assert summary.diagnosis is not None
    assert not summary.diagnosis.source
    assert " ".join(summary.diagnosis.evidence[0].replace("`", "").split()) in " ".join(card.split())
