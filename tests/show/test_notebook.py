"""Results in a notebook: the words and colours of the terminal, in a real one too."""

from __future__ import annotations

import pytest

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


def test_colours_become_styles_and_names_stay_text():
    shown = cell("\x1b[31;1mNOT HEALTHY\x1b[0m in <b>head</b>", "<svg/>")
    assert 'font-weight:600">NOT HEALTHY</span> in &lt;b&gt;head&lt;/b&gt;' in shown
    assert shown.startswith('<div class="nanny"><svg/>')


def test_a_diagnosis_shows_its_remedy():
    one = Diagnosis(cause="data_nan", culprit="data:input", step=3, confidence=0.95, remedy="check the loader")
    assert "fix: check the loader" in one._repr_html_()


@pytest.mark.slow
def test_a_notebook_shows_tensor_diff_run_and_diagnosis():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)])
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    shown = [out["data"]["text/html"] for out in book.cells[0].outputs if "data" in out]
    assert len(shown) == 4
    assert "not safe in fp16" in shown[0]
    assert "fp16" in shown[1]
    assert "gradient_never_cleared" in shown[2]
    assert "nanny rule gradient_never_cleared" in shown[3]
