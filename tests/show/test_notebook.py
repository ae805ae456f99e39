"""Results in a notebook: the words and colours of the terminal, in a real one too."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat
import pytest

import nanny
from nanny.core.finding import NannyError
from nanny.diagnose.records import Diagnosis
from nanny.show.notebook import cell

CODE = """
import torch, nanny
from torch import nn
from IPython.display import display
display(nanny.analyze_tensor(torch.tensor([1.0, 70000.0]), "fp16"))
display(nanny.auto_diff(nn.Sequential(nn.Linear(4, 4)), torch.full((2, 4), 3e4), torch.float16))
model = nn.Sequential(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with nanny.MixedPrecisionNanny(model, optimizer, output_dir=None, live=False) as watched:
    for step in range(12):
        with watched.step(step):
            model(torch.full((2, 4), 3.0)).mean().backward()
            optimizer.step()
display(watched)
display(nanny.diagnose(watched)[0])
"""


LIVE = """
import torch, nanny
from torch import nn
view = nanny.live_cell("logs", seconds=0.1)
model = nn.Sequential(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with nanny.MixedPrecisionNanny(model, optimizer, output_dir="logs", live=False) as watched:
    for step in range(12):
        with watched.step(step):
            model(torch.full((2, 4), 3.0)).mean().backward()
            optimizer.step()
assert view.wait(60), "it ends with the run"
"""


def test_colours_become_styles_and_names_stay_text():
    shown = cell("\x1b[31;1mNOT HEALTHY\x1b[0m in <b>head</b>", "<svg/>")
    assert 'font-weight:600">NOT HEALTHY</span> in &lt;b&gt;head&lt;/b&gt;' in shown
    assert shown.startswith('<div class="nanny"><svg/>')


def test_a_diagnosis_shows_its_remedy():
    one = Diagnosis(cause="data_nan", culprit="data:input", step=3, confidence=0.95, remedy="check the loader")
    assert "fix: check the loader" in one._repr_html_()


def shown_by(code: str, folder: Path) -> list[str]:
    """The HTML of a notebook's only cell, run in a real kernel."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return [out["data"]["text/html"] for out in book.cells[0].outputs if "data" in out]


@pytest.mark.slow
def test_a_live_cell_follows_the_run_to_its_end_and_shows_one_picture(tmp_path):
    (shown,) = shown_by(LIVE, tmp_path)
    assert "<svg" in shown
    assert "gradient_never_cleared" in shown
    assert "waiting for a run" not in shown


def test_without_a_notebook_a_live_cell_says_what_to_type():
    with pytest.raises(NannyError, match="nanny tail"):
        nanny.live_cell()


@pytest.mark.slow
def test_a_notebook_shows_tensor_diff_run_and_diagnosis(tmp_path):
    shown = shown_by(CODE, tmp_path)
    assert len(shown) == 4
    assert "not safe in fp16" in shown[0]
    assert "fp16" in shown[1]
    assert "gradient_never_cleared" in shown[2]
    assert "nanny rule gradient_never_cleared" in shown[3]
