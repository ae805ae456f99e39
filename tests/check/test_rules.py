"""The checker on marked source files: every `# expect: CODE` is found on its line, and nothing else anywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nanny.check import Options, all_rules, check_project, check_source, engine
from nanny.check.credit import CREDIT, loudest
from nanny.core.finding import Severity

FIXTURES = Path(__file__).parent / "fixtures"
MARK = re.compile(r"#\s*expect:\s*([A-Z0-9_, ]+)")


def marks(text: str) -> set[tuple[int, str]]:
    found = set()
    for number, line in enumerate(text.splitlines(), 1):
        match = MARK.search(line)
        if match:
            found |= {(number, code.strip()) for code in match.group(1).split(",") if code.strip()}
    return found


def reported(text: str, name: str) -> set[tuple[int, str]]:
    return {(f.line or 0, f.code) for f in check_source(text, name, Options())}


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("bad/*.py")), ids=lambda p: p.stem)
def test_exactly_the_marked_lines_are_reported(path: Path):
    text = path.read_text()
    assert marks(text), "a bad fixture without a mark proves nothing"
    assert reported(text, path.name) == marks(text)


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("clean/*.py")), ids=lambda p: p.stem)
def test_right_code_stays_silent(path: Path):
    assert reported(path.read_text(), path.name) == set()


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("bad/*.py")), ids=lambda p: p.stem)
def test_an_error_is_proved_by_a_chain_that_ends_where_it_is_told(path: Path):
    text = path.read_text()
    for finding in check_source(text, path.name, Options()):
        assert finding.chain or finding.severity < Severity.ERROR
        assert all(link.file == path.name and 1 <= link.line <= len(text.splitlines()) for link in finding.chain)
        if finding.severity == Severity.ERROR:
            assert finding.line in {link.line for link in finding.chain}
            assert not finding.message.startswith("possible")


def codes(text: str, **options: str) -> set[str]:
    return {f.code for f in check_source(text, "train.py", Options(**options))}


@pytest.mark.parametrize(("first", "is_open"), [('scaler = torch.amp.GradScaler("cuda")', False), ("", True)])
def test_a_plain_backward_is_sure_only_beside_a_scaler_that_is_seen_to_be_made(first: str, is_open: bool):
    text = (
        f"import torch\n\n\ndef train(net, opt, batches, scaler):\n    {first}\n    for x in batches:\n"
        '        with torch.autocast("cuda", dtype=torch.float16):\n            loss = net(x).mean()\n'
        "        opt.zero_grad()\n        scaler.scale(loss).backward()\n        loss.square().backward()\n"
        "        scaler.step(opt)\n        scaler.update()\n"
    )
    told = {f.code: f.message.startswith("possible") for f in check_source(text, "train.py", Options())}
    assert told["SCALER_BACKWARD_UNSCALED"] is is_open


@pytest.mark.parametrize(("made", "is_open"), [("net.train()", True), ("net = torch.nn.Linear(4, 1).cuda()", False)])
def test_an_eps_beside_what_a_model_may_give_back_is_possible(made: str, is_open: bool):
    text = (
        f"import torch\n\n\ndef train(net, opt, scaler, x):\n    {made}\n"
        '    with torch.autocast("cuda", dtype=torch.float16):\n        share = net(x)\n'
        "        loss = -(1 / share.clamp(min=1e-12)).mean()\n    scaler.scale(loss).backward()\n    scaler.step(opt)\n"
        "    scaler.update()\n"
    )
    told = {f.code: f for f in check_source(text, "train.py", Options())}
    assert told["NUM_EPS_UNDERFLOW"].message.startswith("possible") is is_open


def test_a_file_does_not_import_itself_wherever_the_project_is_named_from():
    files = {
        "model/__init__.py": "def hide(scores, mask):\n    return scores.masked_fill(mask, -1e9)\n",
        "utils/model.py": "from model import hide\n\n\ndef run(scores, mask):\n    return hide(scores.half(), mask)\n",
    }
    for above in ("", "work/", "work/deeper/"):
        told = check_project({above + name: text for name, text in files.items()}, Options())
        assert {f.code for f in told[f"{above}model/__init__.py"]} == {"NUM_MASK_CONSTANT"}, above


PROJECT = {
    "app/layers.py": """
import torch.nn as nn

class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim)

    def forward(self, x, mask):
        q = self.q(x)
        scores = (q @ q.transpose(1, 2)).masked_fill(mask, -1e9)
        return scores.softmax(-1) @ q
""",
    "app/steps.py": """
import torch

def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
""",
    "app/train.py": """
import torch
from app.layers import Attention
from . import steps

def main(loader):
    net = Attention(8).cuda()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, mask in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = net(x, mask).sum()
        scaler.scale(loss).backward()
        steps.clip(net)
        scaler.step(opt)
        scaler.update()
""",
}


def test_a_model_is_judged_in_the_region_of_the_file_that_runs_it():
    found = check_project(PROJECT, Options())
    assert [(f.code, f.line) for f in found["app/layers.py"]] == [("NUM_MASK_CONSTANT", 11)]
    assert "app/train.py:11" in found["app/layers.py"][0].message


def test_a_helper_of_another_file_takes_part_in_the_order_of_calls():
    found = check_project(PROJECT, Options())
    assert [(f.code, f.line) for f in found["app/steps.py"]] == [("SCALER_CLIP_BEFORE_UNSCALE", 5)]
    assert found["app/train.py"] == []


def test_the_same_files_alone_have_nothing_to_report():
    assert [f for text in PROJECT.values() for f in check_source(text, "one.py", Options())] == []


BCE = """
import torch
import torch.nn.functional as F

def loss(model, x, y, device):
    with torch.autocast(device.type):
        return F.binary_cross_entropy(torch.sigmoid(model(x)), y)
"""


def test_the_device_decides_where_the_code_does_not_say():
    assert codes(BCE, device="cpu") == set()
    unknown, known = (check_source(BCE, "f.py", Options(device=d))[0] for d in (None, "cuda"))
    assert unknown.message.startswith("possible")
    assert not known.message.startswith("possible")
    assert "device is not known" in unknown.message


def test_a_message_states_where_the_half_comes_from():
    finding = check_source((FIXTURES / "bad" / "attention_minus_1e9_under_fp16.py").read_text(), "a.py", Options())[0]
    assert "autocast on cuda in fp16 at line" in finding.message
    assert finding.hint


def test_a_syntax_error_is_raised_even_where_nothing_is_half():
    with pytest.raises(SyntaxError):
        check_source("def f(:\n    pass\n", "broken.py", Options())


def test_code_that_calls_itself_ends():
    text = "import torch\ndef f(x):\n    return g(x.half())\ndef g(x):\n    return f(x) + g(x)\nf(1)\n"
    assert check_source(text, "loop.py", Options()) == []


def test_every_rule_has_its_page():
    for code, entry in all_rules().items():
        sections = [s for s in ("Why:", "Example:", "Use instead:", "When not:") if s in entry.doc]
        assert len(sections) == 4, f"{code} lacks a section"
        assert len(entry.doc.splitlines()[0]) < 130


CHECKPOINT = """
import torch

def main(model, loader, loss_fn, path):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    {load}
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, path)
"""


@pytest.mark.parametrize(
    ("load", "severity"),
    [
        ('optimizer.load_state_dict(torch.load(path)["optimizer"])', Severity.WARNING),
        ("restore(torch.load(path), optimizer)", Severity.WARNING),  # may load it
        ('model.load_state_dict(torch.load(path)["model"])', Severity.INFO),  # the optimizer's state nobody loads either
        ("pass", Severity.INFO),
    ],
)
def test_a_scaler_left_out_matters_where_the_optimizer_is_loaded(load: str, severity: Severity):
    (finding,) = check_source(CHECKPOINT.format(load=load), "train.py", Options())
    assert (finding.code, finding.severity) == ("SCALER_NOT_SAVED", severity)


STAND_IN = """
import torch

class NoScaler:
    def scale(self, loss):
        return loss

    def step(self, optimizer):
        optimizer.step()

    def update(self):
        pass

def make(is_on):
    return torch.amp.GradScaler("cuda") if is_on else {other}

class Trainer:
    def __init__(self, model, is_on):
        self.is_on, self.model, self.scaler = is_on, model, make(is_on)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self, x, y):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        if self.is_on:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
"""


@pytest.mark.parametrize(("other", "told"), [("NoScaler()", set()), ('torch.amp.GradScaler("cuda")', {"SCALER_STEP_BYPASSED"})])
def test_a_plain_step_is_no_mistake_where_something_stands_in_for_the_scaler(other: str, told: set[str]):
    assert codes(STAND_IN.format(other=other)) == told


NUMPY = """
import torch
from torch import nn

class Aligner(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x):
        return {score}.detach().cpu().numpy()

{start}
"""


@pytest.mark.parametrize(
    ("score", "start", "severity"),
    [
        ("self.net(x)", "", Severity.WARNING),
        ("self.net(x).log_softmax(-1)", "", Severity.INFO),  # float32, if whoever calls it has opened autocast
        ("self.net(x).log_softmax(-1)", "Aligner()(torch.ones(1, 8, dtype=torch.bfloat16))", Severity.WARNING),
    ],
)
def test_where_autocast_may_have_made_float32_numpy_is_only_possible(score: str, start: str, severity: Severity):
    told = {f.code: f.severity for f in check_source(NUMPY.format(score=score, start=start), "align.py", Options())}
    assert told["NUM_NUMPY_BF16"] is severity


UNSCALED = """
import torch

def clip(optimizer, scaler, params, others, is_sharded):
    if is_sharded:
        scaler.unscale_(optimizer)
        {leave}
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(params, 1.0)

def train(model, batches, is_sharded):
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
    for x in batches:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).float().mean()
        scaler.scale(loss).backward()
        clip(optimizer, scaler, list(model.parameters()), [], is_sharded)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("leave", "is_told", "is_open"),
    [("pass", True, False), ("if others == params: return", True, True), ("return", False, False)],
)
def test_a_second_unscale_is_only_possible_where_the_first_may_leave(leave: str, is_told: bool, is_open: bool):
    told = [f for f in check_source(UNSCALED.format(leave=leave), "train.py", Options()) if f.code == "SCALER_UNSCALE_TWICE"]
    assert bool(told) is is_told
    assert any("others == params" in f.message for f in told) is is_open


WRITE = """
import torch
from torch import nn

def render(model, rays, hits):
    out = torch.zeros(len(rays), device="cuda")
    {made}
    with torch.autocast("cuda", dtype=torch.float16):
        out[hits > 0] = model(rays[hits > 0])
    return out
"""


def test_a_dtype_that_is_only_guessed_is_no_warning():
    guessed, known = (check_source(WRITE.format(made=m), "r.py", Options()) for m in ("pass", "model = nn.Linear(3, 1).cuda()"))
    assert [(f.code, f.severity) for f in guessed] == [("NUM_INDEXED_WRITE", Severity.INFO)]
    assert [(f.code, f.severity) for f in known] == [("NUM_INDEXED_WRITE", Severity.WARNING)]


@pytest.mark.parametrize(
    ("path", "told"), [("torch.optim.lr_scheduler.LRScheduler", set()), ("torch.optim.SGD", {"SCALER_STEP_BYPASSED"})]
)
def test_an_annotated_scheduler_is_no_optimizer(path: str, told: set[str]):
    text = (
        f"import torch\n\n\ndef train(net, opt, other: {path}, scaler, batches):\n    for x in batches:\n"
        '        with torch.autocast("cuda", dtype=torch.float16):\n            loss = net(x).mean()\n        opt.zero_grad()\n'
        "        scaler.scale(loss).backward()\n        scaler.step(opt)\n        scaler.update()\n        other.step()\n"
    )
    assert codes(text) == told


def test_a_test_that_a_pass_turns_for_the_next_lets_unscale_run_once():
    text = (
        'import torch\n\n\ndef step(groups, opt, loss):\n    scaler = torch.amp.GradScaler("cuda")\n'
        "    scaler.scale(loss).backward()\n    waits = True\n    for group in groups:\n        if waits:\n"
        "            scaler.unscale_(opt)\n            waits = False\n        torch.nn.utils.clip_grad_norm_(group, 1.0)\n"
        "    scaler.step(opt)\n    scaler.update()\n"
    )
    assert codes(text) == set()
    assert "SCALER_UNSCALE_TWICE" in codes(text.replace("            waits = False\n", ""))


def test_an_option_that_is_on_or_off_is_no_scale():
    text = (
        "import argparse\n\nimport torch\n\nparser = argparse.ArgumentParser()\n"
        'parser.add_argument("--no-amp", dest="amp", action="store_false")\nargs = parser.parse_args()\n'
        "scaler = torch.cuda.amp.GradScaler({})\n"
    )
    assert "SCALER_SETTINGS" in codes(text.format("args.amp"))
    assert "SCALER_SETTINGS" not in codes(text.format("enabled=args.amp"))


TRIAGE = Path(__file__).parents[2] / "docs" / "check-triage.md"


def test_how_loud_a_rule_is_follows_from_what_it_has_earned_in_the_docs():
    rows = re.findall(r"^\| ([A-Z0-9_]+) \| (\d+) \| (\d+) \| (\d+) \| (error|warning|remark) \|$", TRIAGE.read_text(), re.M)
    assert {code: tuple(map(int, numbers)) for code, *numbers, _ in rows} == {
        code: (c.right, c.wrong, c.unclear) for code, c in CREDIT.items()
    }
    told = {code: Severity.parse({"remark": "info"}.get(word, word)) for code, *_, word in rows}
    assert told == {code: loudest(code, Severity.ERROR) for code in CREDIT}
    assert set(CREDIT) <= set(all_rules())
    assert loudest("NEW_RULE", Severity.ERROR) == Severity.INFO


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("bad/*.py")), ids=lambda p: p.stem)
def test_what_is_loud_is_proved_or_earned_on_code_of_strangers(path: Path, monkeypatch: pytest.MonkeyPatch):
    made, finding_of = [], engine._finding

    def kept(rule, hit, *rest):
        made.append((hit, finding_of(rule, hit, *rest)))
        return made[-1][1]

    monkeypatch.setattr(engine, "_finding", kept)
    check_source(path.read_text(), path.name, Options())
    for hit, finding in made:
        is_earned = finding.severity <= loudest(finding.code, Severity.ERROR, is_open=bool(hit.unknown))
        assert is_earned or (hit.is_proven and not hit.unknown and hit.chain)


@pytest.mark.parametrize(("test", "is_open"), [("if limit > 0:", True), ("if True:", False)])
def test_a_hook_under_a_condition_of_its_own_is_possible(test: str, is_open: bool):
    text = (
        f"import torch\n\n\ndef train(net, opt, batches, limit):\n    {test}\n        for p in net.parameters():\n"
        "            p.register_hook(lambda g: torch.clamp(g, -limit, limit))\n"
        '    scaler = torch.amp.GradScaler("cuda")\n    for x in batches:\n'
        '        with torch.autocast("cuda", dtype=torch.float16):\n            loss = net(x).float().mean()\n'
        "        opt.zero_grad()\n        scaler.scale(loss).backward()\n        scaler.step(opt)\n        scaler.update()\n"
    )
    told = {f.code: f.message.startswith("possible") for f in check_source(text, "train.py", Options())}
    assert told == {"SCALER_GRADS_STILL_SCALED": is_open}


@pytest.mark.parametrize("kind", ["torch.float16", "torch.half"])
def test_what_only_a_test_opens_is_told_one_step_lower(kind: str):
    model = "def masked(scores, mask):  # used under autocast\n    return scores.masked_fill(mask, -1e9).softmax(-1)\n"
    program = (
        "import torch\nfrom model import masked\n\n\ndef run(q, k, mask):\n"
        f'    with torch.autocast("cuda", dtype={kind}):\n        return masked(q @ k, mask)\n'
    )
    for first, severity in (("", Severity.WARNING), ("import pytest\n", Severity.INFO)):
        found = check_project({"model.py": model, "main.py": first + program})
        assert [(f.code, f.severity) for f in found["model.py"]] == [("NUM_MASK_CONSTANT", severity)]


@pytest.mark.parametrize(("length", "is_bounded"), [("norm", True), ("mean", False)])
def test_exp_of_products_of_vectors_is_bounded_where_each_is_divided_by_its_length(length: str, is_bounded: bool):
    text = f"""
import torch
from torch import nn
tower = nn.Linear(8, 8).half()
def alike(x):
    z = tower(x)
    z = z / z.{length}(dim=-1, keepdim=True)
    return (z @ z.t()).exp().sum(-1).log()
"""
    assert ("NUM_LOGSUMEXP" in codes(text)) is not is_bounded


@pytest.mark.parametrize(("test", "severity"), [("if True:", "WARNING"), ("if args.half:", "INFO")])
def test_a_cast_that_the_user_chooses_is_a_remark(test: str, severity: str):
    text = (
        f"import torch\n\n\ndef main(args, batches):\n    net = torch.nn.Linear(4, 1)\n    {test}\n        net.bfloat16()\n"
        "    opt = torch.optim.SGD(net.parameters(), lr=0.1)\n    for x in batches:\n        opt.zero_grad()\n"
        "        net(x).mean().backward()\n        opt.step()\n"
    )
    assert [(f.code, f.severity.name) for f in check_source(text, "train.py", Options())] == [("HALF_CALL", severity)]
