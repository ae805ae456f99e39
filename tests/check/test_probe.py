"""A file is left alone before all of it is walked only if the whole walk would find nothing in it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from nanny.check import engine
from nanny.check.interpreter.interpreter import Interpreter
from nanny.check.interpreter.probe import probe
from nanny.check.interpreter.source import Project, SourceFile, says_half
from nanny.check.interpreter.trace import Options

HERE = Path(__file__).parent
USE = "    return x.masked_fill(x == 0, -1e9)\n"
# a dtype goes from a function that names it to one that does not, by every way there is between two functions
WAYS = {
    "returned": f"import torch\n\ndef kind():\n    return torch.float16\n\ndef use(x):\n    x = x.to(kind())\n{USE}",
    "global": f"import torch\n\nKIND = torch.float16\n\ndef use(x):\n    x = x.to(KIND)\n{USE}",
    "declared global": "import torch\n\ndef choose():\n    global KIND\n    KIND = torch.float16\n\n"
    f"def use(x):\n    x = x.to(KIND)\n{USE}",
    "table": f"import torch\n\nKINDS = {{'a': torch.float16}}\n\ndef use(x):\n    x = x.to(KINDS['a'])\n{USE}",
    "field": "import torch\n\nclass Net:\n    def __init__(self):\n        self.kind = torch.float16\n\n"
    f"    def use(self, x):\n        x = x.to(self.kind)\n    {USE}",
    "class field": "import torch\n\nclass Net:\n    kind = torch.float16\n\n"
    f"    def use(self, x):\n        x = x.to(self.kind)\n    {USE}",
    "property": "import torch\n\nclass Net:\n    @property\n    def kind(self):\n        return torch.float16\n\n"
    f"    def use(self, x):\n        x = x.to(self.kind)\n    {USE}",
    "argument": f"import torch\n\ndef use(x, kind):\n    x = x.to(kind)\n{USE}\n"
    "def start(x):\n    return use(x, torch.float16)\n",
    "default": f"import torch\n\ndef use(x, kind=torch.float16):\n    x = x.to(kind)\n{USE}",
    "closure": "import torch\n\ndef make():\n    kind = torch.float16\n    def use(x):\n        x = x.to(kind)\n"
    f"    {USE}    return use\n",
    "two steps": "import torch\n\ndef kind():\n    return torch.float16\n\ndef other():\n    return kind()\n\n"
    f"def use(x):\n    x = x.to(other())\n{USE}",
}


def parsed(text: str) -> tuple[SourceFile, Project]:
    return SourceFile("x.py", ast.parse(text), "x", text), Project({"x.py": text})


@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_dtype_is_seen_however_it_goes_from_one_function_to_another(way):
    source, project = parsed(WAYS[way])
    assert not source.uses.is_active
    assert probe(Interpreter(project, Options()), source) is None
    assert [f.code for f in engine.check_source(WAYS[way])] == ["NUM_MASK_CONSTANT"]


def test_a_file_that_only_asks_for_a_dtype_is_not_walked():
    text = "import torch\n\ndef wide(x):\n    return x.dtype in (torch.float32, torch.float16)\n\ndef use(x):\n"
    source, project = parsed(text + USE)
    seen = probe(Interpreter(project, Options()), source)
    assert seen is not None
    assert [trace.name for trace in seen.traces] == ["<module>", "wide"]


@pytest.mark.landing
def test_no_finding_of_the_fixtures_is_lost(monkeypatch):
    texts = [path.read_text() for folder in ("fixtures", "layouts") for path in sorted((HERE / folder).rglob("*.py"))]
    texts = [text for text in texts if says_half(text)]
    assert len(texts) > 300
    short = [engine.check_source(text, "x.py") for text in texts]
    monkeypatch.setattr(engine, "probe", lambda *_: None)
    assert short == [engine.check_source(text, "x.py") for text in texts]
