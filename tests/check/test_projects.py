"""Several files together: a finding depends neither on file names nor on what else is checked or defined beside it."""

from __future__ import annotations

import pytest

from nanny.check import Options, check_project, check_source
from nanny.check.cache import Cache
from nanny.check.files import check_paths

CLIP = """
import torch

def train(model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

def helper(x):
    return x.half()

if __name__ == "__main__":
    train(torch.nn.Linear(8, 8), None, [])
"""
NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x)
"""
LOOP = """
    for x, y in loader:
        loss = nn.functional.mse_loss({model}(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def codes(sources: dict[str, str]) -> dict[str, list[str]]:
    return {name: [f.code for f in found] for name, found in check_project(sources, Options()).items()}


@pytest.mark.parametrize("importer", ["evaluate.py", "zevaluate.py"])
def test_a_file_that_another_imports_keeps_its_findings(importer):
    found = codes({importer: "import torch\nfrom train import helper\nprint(helper(torch.ones(1)).half())\n", "train.py": CLIP})
    assert found["train.py"] == ["SCALER_CLIP_BEFORE_UNSCALE"]


@pytest.mark.parametrize(
    "branch",
    ["try:\n    import apex\nexcept ImportError:\n    apex = None", "if DEBUG:\n    LEVEL = 1\nelse:\n    LEVEL = 2",
     "match LEVEL:\n    case 1:\n        pass"],
    ids=["try", "if", "match"],
)  # fmt: skip
def test_a_branch_at_module_level_hides_nothing_below(branch):
    assert [f.code for f in check_source(f"{branch}\n{CLIP}", "train.py")] == ["SCALER_CLIP_BEFORE_UNSCALE"]


def test_what_one_file_does_to_a_class_is_not_known_to_another():
    sources = {
        "net.py": NET,
        "infer.py": "import torch\nfrom net import Net\nmodel = Net().half().eval()\n",
        "train.py": f"import torch\nfrom torch import nn\nfrom net import Net\nHALF = torch.float16\n\ndef main(loader):\n"
        f"    model = Net()\n    optimizer = torch.optim.Adam(model.parameters()){LOOP.format(model='model')}",
    }
    assert codes(sources) == {"net.py": [], "infer.py": [], "train.py": []}


def test_a_half_teacher_leaves_a_student_of_its_class_alone():
    body = "    teacher = Net().half().eval().requires_grad_(False)\n    student = Net()\n"
    text = f"{NET}\ndef main(loader):\n{body}    optimizer = torch.optim.Adam(student.parameters()){LOOP.format(model='student')}"
    assert [f.code for f in check_source(text, "train.py")] == []


def test_a_setting_is_reported_in_the_file_that_writes_it():
    sources = {
        "make.py": "import torch\n\ndef make_scaler(**options):\n    return torch.amp.GradScaler('cuda', **options)\n",
        "train.py": "import torch\nfrom make import make_scaler\n" + "\n" * 30 + "options = dict(init_scale=1.0)\n"
        "scaler = make_scaler(**options)\nscaler.unscale_(None)\n",
    }
    found = check_project(sources, Options())
    assert [(f.code, f.line) for f in found["train.py"]] == [("SCALER_SETTINGS", 33)]
    assert found["make.py"] == []


REGISTRY = """
class Table:
    def __init__(self):
        self.kept = {}

    def add(self, cls):
        self.kept[cls.__name__] = cls
        return cls

TABLE = Table()
"""
SCORES = """
from torch import nn
from registry import TABLE

@TABLE.add
class Plain(nn.Identity):
    pass

@TABLE.add
class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, mask):
        return self.fc(x).masked_fill(mask, NUMBER)
"""
RUN = """
import torch
IMPORT
from registry import TABLE

def run(x, mask):
    model = TABLE.kept["Scores"]()
    with torch.autocast("cuda", dtype=torch.float16):
        return model(x, mask)
"""


@pytest.mark.parametrize("imported", ["import scores", "from scores import Plain", "import scores as _"])
@pytest.mark.parametrize(("number", "expected"), [("-1e9", ["NUM_MASK_CONSTANT"]), ("-1e4", [])])
def test_a_file_that_is_imported_for_what_it_registers_is_read(imported, number, expected):
    sources = {"registry.py": REGISTRY, "scores.py": SCORES.replace("NUMBER", number), "run.py": RUN.replace("IMPORT", imported)}
    assert codes(sources).get("scores.py", []) == expected


SAVES = """
import torch

def keep(model, optimizer, path):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
"""
USES = """
import torch
from core.keeping import keep

def main(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in batches:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    keep(model, optimizer, "last.pt")
"""


@pytest.mark.parametrize("folder", ["src", "lib"])
@pytest.mark.parametrize("asked", [".", "tools/train.py"])
def test_a_script_finds_what_its_project_keeps_in_a_folder_beside_it(tmp_path, folder, asked):
    for name, text in {"tools/train.py": USES, f"{folder}/core/keeping.py": SAVES, "setup.cfg": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / ".git").mkdir()
    found = check_paths([str(tmp_path / asked)], jobs=1).findings
    assert [(f.code, f.file) for f in found] == [("SCALER_NOT_SAVED", str(tmp_path / folder / "core" / "keeping.py"))]


BASE = """
import torch
from torch.cuda.amp import GradScaler, autocast


class Base:
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.scaler = model, optimizer, GradScaler()

    def after_backward(self):
        pass

    def train_step(self, batch):
        with autocast():
            loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        self.after_backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
"""
CLIPPED = """
import torch
from base import Base


class Clipped(Base):
    def loss(self, batch):
        return self.model(batch).float().pow(2).mean()

    def after_backward(self):
        {unscale}
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
"""
STARTS = """
import torch
from clipped import Clipped


def main():
    model = torch.nn.Linear(4, 4)
    trainer = Clipped(model, torch.optim.AdamW(model.parameters()))
    for _ in range(9):
        trainer.train_step(torch.ones(1, 4))


if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("unscale", "told"), [("pass", ["SCALER_CLIP_BEFORE_UNSCALE"]), ("self.scaler.unscale_(self.optimizer)", [])]
)
def test_a_program_that_says_nothing_of_half_is_walked_from_where_it_starts(unscale, told):
    found = codes({"base.py": BASE, "clipped.py": CLIPPED.format(unscale=unscale), "main.py": STARTS})
    assert [code for code in found["clipped.py"] if not code.endswith("DEPRECATED")] == told


def test_a_program_that_reaches_nothing_half_is_known_the_next_time(tmp_path):
    for name, text in {
        "base.py": "x = 1\n",
        "clipped.py": "from base import x\n",
        "main.py": f"from clipped import x\n{STARTS}",
    }.items():
        (tmp_path / name).write_text(text)
    cache = Cache(str(tmp_path / "cache" / "check.sqlite"))
    assert len(check_paths([str(tmp_path)], jobs=1, cache=cache).checked[str(tmp_path / "main.py")].read) == 3
    (tmp_path / "base.py").write_text(BASE)
    (tmp_path / "clipped.py").write_text(CLIPPED.format(unscale="pass"))
    found = check_paths([str(tmp_path)], jobs=1, cache=cache).findings
    assert "SCALER_CLIP_BEFORE_UNSCALE" in {f.code for f in found}
