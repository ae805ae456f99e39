"""Large and odd inputs cost no more than their size: the work is counted in calls, so that no clock decides."""

from __future__ import annotations

import json
import sys

import pytest

from nanny.check.config import Config
from nanny.check.files import Report, check_text
from nanny.check.rules import protocol

STEP = """\
    scaler.scale(model(x)).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
"""


def chain(size: int) -> str:
    return f"import torch\nx = torch.float16\ny = a{'.b' * size}\n"


def calls(size: int) -> str:
    return f"import torch\nx = torch.float16\ny = a{'.b()' * (size // 4)}\n"


def branches(size: int) -> str:
    body = "".join(f"    x{i} = x * {i}\n    if x{i}:\n        x = x + {i}\n" for i in range(size // 3))
    return f"import torch\n\ndef f(x):\n    x = x.half()\n{body}"


def comprehensions(size: int) -> str:
    body = "".join(f"    x{i} = [v * {i} for v in x]\n" for i in range(size))
    return f"import torch\n\ndef f(x):\n    x = x.half()\n{body}"


def formulas(size: int) -> str:
    return "import torch\n\ndef f(x):\n    x = x.half()\n" + "    y = x.exp().sum() + torch.log(x.softmax(-1))\n" * (size // 4)


def steps(size: int) -> str:
    return f"import torch\n\ndef f(model, x, opt, scaler):\n{STEP * (size // 5)}"


def methods(size: int) -> str:
    body = "".join(f"    def m{i}(self, x):\n        return self.m{i - 1}(x).half()\n" for i in range(1, size // 2))
    return f"import torch\n\nclass A(torch.nn.Module):\n    def m0(self, x):\n        return x.half()\n{body}"


def scalers_in_loops(size: int) -> str:
    body = "    for x in xs:\n        scaler = torch.amp.GradScaler('cuda')\n        scaler.scale(model(x)).backward()\n"
    return "import torch\n" + "".join(f"\ndef f{i}(model, xs):\n{body}" for i in range(size // 5))


def counted(text: str, kind: str = "python") -> tuple[int, Report]:
    """How many functions of Python are called for a text."""
    seen = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal seen
        seen += event == "call"

    sys.setprofile(count)
    try:
        report = check_text(text, f"x.{'py' if kind == 'python' else 'ipynb'}", Config(), kind)
    finally:
        sys.setprofile(None)
    return seen, report


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    "make", [chain, calls, branches, comprehensions, formulas, steps, methods, scalers_in_loops], ids=lambda make: make.__name__
)
def test_four_times_the_code_is_four_times_the_work(make, monkeypatch):
    monkeypatch.setattr(protocol, "HORIZON", 20)
    counted(make(40))  # what is loaded once
    small, _ = counted(make(200))
    large, _ = counted(make(800))
    assert large < 6 * small


def test_a_step_that_is_written_again_and_again_costs_the_same_each_time():
    def again(size: int) -> str:
        first = 'import torch\n\ndef f(model, x, opt):\n    scaler = torch.amp.GradScaler("cuda")\n'
        return first + "    scaler.scale(model(x)).backward()\n" + "    scaler.step(opt)\n" * size

    counted(again(20))
    small, _ = counted(again(100))
    large, _ = counted(again(400))
    assert large < 5 * small


def test_a_chain_of_fifty_thousand_attributes_is_said_to_be_too_deep():
    work, report = counted(chain(50_000))
    assert report.notes == ["x.py: skipped, its code is nested too deeply to be read"]
    assert work < 10_000


def test_a_notebook_of_broken_cells_costs_what_its_cells_cost():
    def notebook(size: int) -> str:
        cell = {"cell_type": "code", "source": "!run \\\n  --x\nimport torch\ndef f(:\n"}
        return json.dumps({"cells": [cell] * size, "metadata": {}})

    counted(notebook(2), "notebook")
    small, _ = counted(notebook(20), "notebook")
    large, report = counted(notebook(80), "notebook")
    assert large < 6 * small
    assert {f.code for f in report.findings} == {"SYNTAX_ERROR"}
    assert len(report.findings) == 80


def test_a_dictionary_that_holds_what_was_made_of_itself_ends() -> None:
    source = (
        "import pydoc\nimport torch\n\ndef build(name, keys, kwargs):\n    kw = dict(**kwargs)\n    for k in keys:\n"
        "        kw[k] = pydoc.locate(kw[k])\n    return pydoc.locate(name)(**kw)\n\ndef main(name, keys, kwargs, x):\n"
        "    net = build(name, keys, kwargs)\n    opt = torch.optim.SGD(net.parameters(), 0.1)\n"
        '    with torch.autocast("cuda", dtype=torch.bfloat16):\n        net(x).sum()\n'
    )
    assert check_text(source, "x.py", Config()).findings == []
