"""Silent mistakes of a loop: the programs of the pages, and further ways to make them, watched."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from nanny import Finding, MixedPrecisionNanny, Severity
from nanny.diagnose.knowledge import causes

WATCHED = (
    "step_changes_nothing",
    "in_no_optimizer",
    "trained_but_frozen",
    "no_gradient_arrives",
    "gradient_never_cleared",
    "step_without_backward",
    "backward_without_step",
    "mode_mismatch",
    "same_batch_again",
    "gradient_gone_for_one_step",
    "autocast_not_applied",
)


def watched(program: str) -> tuple[list[Finding], str]:
    """Findings and verdict of a program that knows nothing of the nanny."""
    nanny = MixedPrecisionNanny(None, output_dir=None, live=False, strict=True)
    nanny.steps_by_themselves(find_models=True)
    try:
        exec(compile(program, "page.md", "exec"), {"__name__": "page"})
    finally:
        nanny.close()
    return nanny.findings, nanny.verdict("finished").text


@pytest.mark.slow
@pytest.mark.parametrize("name", WATCHED)
def test_the_program_of_a_page_is_told_and_the_repaired_one_is_not(name):
    fails, repaired = causes()[name].programs()
    found, verdict = watched(fails)
    told = [f for f in found if f.code == name.upper()]
    assert len(told) == 1
    assert told[0].step is not None
    assert told[0].step <= 20
    assert name in verdict
    assert [f.code for f in watched(repaired)[0]] == []


HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
def mlp(): return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
def draw(rows=8): x = torch.randn(rows, 6); return x, x[:, :1]
def loss_of(m, x, y): return (m(x) - y).pow(2).mean()
m = mlp()
o = torch.optim.Adam(m.parameters(), lr=1e-2)
"""
# a mistake, the latest step at which it is to be told, the program, and the line that repairs it
WAYS = {
    "a second model, and the optimizer of the first": (
        "IN_NO_OPTIMIZER", 60,
        "for i in range(90):\n"
        "    if i == 50: m = mlp()\n"
        "    loss = loss_of(m, *draw()); o.zero_grad(); loss.backward(); o.step()",
        ("m = mlp()\n    loss", "m = mlp(); o = torch.optim.Adam(m.parameters(), lr=1e-2)\n    loss"),
    ),
    "gradients clipped to nothing": (
        "STEP_CHANGES_NOTHING", 5,
        "for i in range(30):\n"
        "    loss = loss_of(m, *draw()); o.zero_grad(); loss.backward(); nn.utils.clip_grad_norm_(m.parameters(), 0.0); o.step()",
        ("0.0)", "1.0)"),
    ),
    "frozen late, and moved on by what Adam remembers": (
        "TRAINED_BUT_FROZEN", 120,
        "for i in range(130):\n"
        "    if i == 90: m[0].requires_grad_(False)\n"
        "    o.zero_grad(set_to_none=False); loss_of(m, *draw()).backward(); o.step()",
        ("set_to_none=False", "set_to_none=True"),
    ),
    "an optimizer that never steps": (
        "BACKWARD_WITHOUT_STEP", 70,
        "for i in range(40):\n    loss_of(m, *draw()).backward()\n    if i % 4 == 4: o.step(); o.zero_grad()",
        ("i % 4 == 4", "i % 4 == 3"),
    ),
    "an accumulation that is longer than the epoch, at whose start all is cleared": (
        "BACKWARD_WITHOUT_STEP", 70,
        "for epoch in range(12):\n"
        "    o.zero_grad()\n"
        "    for i in range(1, 11):\n"
        "        (loss_of(m, *draw()) / 16).backward()\n"
        "        if i % 16 == 0: o.step(); o.zero_grad()",
        ("i % 16", "i % 5"),
    ),
    "one of two optimizers that never steps": (
        "BACKWARD_WITHOUT_STEP", 20,
        "critic = mlp(); oc = torch.optim.Adam(critic.parameters(), lr=1e-2)\n"
        "for i in range(40):\n"
        "    x, y = draw(); o.zero_grad(); loss_of(m, x, y).backward(); o.step()\n"
        "    oc.zero_grad(); loss_of(critic, x, y).backward()",
        ("loss_of(critic, x, y).backward()", "loss_of(critic, x, y).backward(); oc.step()"),
    ),
    "accumulation that clears at each batch": (
        "BACKWARD_WITHOUT_STEP", 10,
        "for i in range(60):\n    o.zero_grad(); (loss_of(m, *draw()) / 4).backward()\n    if i % 4 == 3: o.step()",
        ("o.zero_grad(); (loss_of(m, *draw()) / 4).backward()\n    if i % 4 == 3: o.step()",
         "(loss_of(m, *draw()) / 4).backward()\n    if i % 4 == 3: o.step(); o.zero_grad()"),
    ),
    "a batch without a target": (
        "GRADIENT_GONE_FOR_ONE_STEP", 41,
        "for i in range(60):\n"
        "    x, _ = draw(); counts = torch.full((8, 1), float(i != 40))\n"
        "    loss = ((m(x) - 3).pow(2) * counts).sum() / counts.sum().clamp(min=1) + 0 * m[2].bias.sum()\n"
        "    o.param_groups[0]['lr'] = 1e-4; o.zero_grad(); loss.backward(); o.step()",
        ("i != 40", "i >= 0"),
    ),
    "a draw that is seeded anew": (
        "SAME_BATCH_AGAIN", 20,
        "data = torch.randn(500, 6)\n"
        "g = torch.Generator()\n"
        "for i in range(30):\n"
        "    g.manual_seed(7); x = data[torch.randperm(500, generator=g)[:16]]\n"
        "    loss = loss_of(m, x, x[:, :1]); o.zero_grad(); loss.backward(); o.step()",
        ("manual_seed(7)", "manual_seed(i)"),
    ),
    "an index that stands still": (
        "SAME_BATCH_AGAIN", 20,
        "data = torch.randn(500, 6)\nat = 0\n"
        "for i in range(30):\n"
        "    x = data[at : at + 16]\n"
        "    loss = loss_of(m, x, x[:, :1]); o.zero_grad(); loss.backward(); o.step()",
        ("data[at : at + 16]", "data[at : at + 16]; at += 16"),
    ),
    "a schedule that falls to 0 by an integer division": (
        "STEP_CHANGES_NOTHING", 35,
        "s = torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: (12 - epoch) // 12)\n"
        "for i in range(60):\n"
        "    loss = loss_of(m, *draw()); o.zero_grad(); loss.backward(); o.step()\n"
        "    if i % 15 == 14: s.step()",
        ("// 12", "/ 12"),
    ),
    "a schedule that falls to 0 late, at once": (
        "STEP_CHANGES_NOTHING", 130,
        "for i in range(140):\n"
        "    o.param_groups[0]['lr'] = 1e-2 * (i < 100)\n"
        "    loss = loss_of(m, *draw()); o.zero_grad(); loss.backward(); o.step()",
        ("* (i < 100)", "/ (1 + i)"),
    ),
    "a decay by epoch that is made at each step": (
        "STEP_CHANGES_NOTHING", 130,
        "o = torch.optim.SGD(m.parameters(), lr=1e-2); s = torch.optim.lr_scheduler.ExponentialLR(o, 0.8)\n"
        "for i in range(140):\n"
        "    loss = loss_of(m, *draw()); o.zero_grad(); loss.backward(); o.step(); s.step()",
        ("; s.step()", "\n    if i % 20 == 19: s.step()"),
    ),
    "a warm-up that never gets anywhere": (
        "STEP_CHANGES_NOTHING", 63,
        "o = torch.optim.SGD(m.parameters(), lr=0.05)\n"
        "for i in range(70):\n"
        "    o.param_groups[0]['lr'] = 0.05 * min(1, (i + 1) / 1e11)\n"
        "    loss = loss_of(m, *draw()); o.zero_grad(); loss.backward(); o.step()",
        ("1e11", "1e4"),
    ),
    "a learning rate below the spacing of the weights": (
        "STEP_CHANGES_NOTHING", 5,
        "o = torch.optim.SGD(m.parameters(), lr=1e-10)\n"
        "for i in range(70):\n"
        "    loss = loss_of(m, *draw()); o.zero_grad(); loss.backward(); o.step()",
        ("1e-10", "1e-5"),
    ),
    "a learning rate below the spacing of weights in 16 bits": (
        "STEP_CHANGES_NOTHING", 5,
        "m = nn.Sequential(nn.Linear(6, 12, bias=False), nn.ReLU(), nn.LayerNorm(12), nn.Flatten())\n"
        "m[0].requires_grad_(False); m[2].bias.requires_grad_(False); m.bfloat16()\n"
        "o = torch.optim.SGD([m[2].weight], lr=1e-4)\n"
        "for i in range(70):\n"
        "    loss = (m(torch.randn(8, 6).to(m[0].weight.dtype)).float() - 0.1).pow(2).mean()\n"
        "    o.zero_grad(); loss.backward(); o.step()",
        ("m.bfloat16()\n", "m.float()\n"),
    ),
    "a first half that runs before autocast": (
        "AUTOCAST_NOT_APPLIED", 0,
        "for i in range(20):\n"
        "    x, y = draw()\n"
        "    h = m[0](x)\n"
        "    with torch.autocast('cpu', dtype=torch.bfloat16):\n"
        "        out = m[2](m[1](h))\n"
        "    loss = (out.float() - y).pow(2).mean(); o.zero_grad(); loss.backward(); o.step()",
        ("    h = m[0](x)\n    with torch.autocast('cpu', dtype=torch.bfloat16):\n",
         "    with torch.autocast('cpu', dtype=torch.bfloat16):\n        h = m[0](x)\n"),
    ),
    "half of the layers in another thread": (
        "AUTOCAST_NOT_APPLIED", 0,
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(1)\n"
        "class Two(nn.Sequential):\n"
        "    def forward(self, x): return self[2](self[1](pool.submit(self[0], x).result()))\n"
        "m = Two(*mlp()); o = torch.optim.Adam(m.parameters(), lr=1e-2)\n"
        "for i in range(20):\n"
        "    x, y = draw()\n"
        "    with torch.autocast('cpu', dtype=torch.bfloat16):\n"
        "        out = m(x)\n"
        "    loss = (out.float() - y).pow(2).mean(); o.zero_grad(); loss.backward(); o.step()\n"
        "pool.shutdown()",
        ("pool.submit(self[0], x).result()", "self[0](x)"),
    ),
    "an adapter of which both factors are 0": (
        "NO_GRADIENT_ARRIVES", 10,
        "class Adapted(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.base = nn.Linear(6, 12); self.a = nn.Linear(6, 2, bias=False)\n"
        "        self.b = nn.Linear(2, 12, bias=False); nn.init.zeros_(self.b.weight); nn.init.zeros_(self.a.weight)\n"
        "    def forward(self, x): return self.base(x) + self.b(self.a(x))\n"
        "m = nn.Sequential(Adapted(), nn.Tanh(), nn.Linear(12, 1)); o = torch.optim.Adam(m.parameters(), lr=1e-2)\n"
        "for i in range(40):\n    o.zero_grad(); loss_of(m, *draw()).backward(); o.step()",
        ("; nn.init.zeros_(self.a.weight)", ""),
    ),
    "nothing to train but adapters of which both factors are 0": (
        "NO_GRADIENT_ARRIVES", 10,
        "class Adapted(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.base = nn.Linear(6, 12).requires_grad_(False); self.a = nn.Linear(6, 2, bias=False)\n"
        "        self.b = nn.Linear(2, 12, bias=False); nn.init.zeros_(self.b.weight); nn.init.zeros_(self.a.weight)\n"
        "    def forward(self, x): return self.base(x) + self.b(self.a(x))\n"
        "m = nn.Sequential(Adapted(), nn.Tanh(), nn.Linear(12, 1).requires_grad_(False))\n"
        "o = torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=1e-2)\n"
        "for i in range(40):\n    o.zero_grad(); loss_of(m, *draw()).backward(); o.step()",
        ("; nn.init.zeros_(self.a.weight)", ""),
    ),
    "layers behind a checkpoint that is given nothing with a gradient": (
        "NO_GRADIENT_ARRIVES", 10,
        "from torch.utils.checkpoint import checkpoint\n"
        "class Stack(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)); self.out = nn.Linear(6, 1)\n"
        "    def forward(self, x):\n"
        "        for layer in self.layers: x = checkpoint(layer, x, use_reentrant=True)\n"
        "        return self.out(x)\n"
        "m = Stack(); o = torch.optim.Adam(m.parameters(), lr=1e-2)\n"
        "for i in range(40):\n    o.zero_grad(); loss_of(m, *draw()).backward(); o.step()",
        ("use_reentrant=True", "use_reentrant=False"),
    ),
    "one of two optimizers that steps again on what it had": (
        "STEP_WITHOUT_BACKWARD", 20,
        "critic = mlp(); oc = torch.optim.Adam(critic.parameters(), lr=1e-2)\n"
        "for i in range(60):\n"
        "    x, y = draw(); oc.zero_grad(); loss_of(critic, x, y).backward(); oc.step()\n"
        "    if i % 5 == 0: o.zero_grad(); loss_of(m, x, y).backward()\n"
        "    o.step()",
        ("loss_of(m, x, y).backward()\n    o.step()", "loss_of(m, x, y).backward(); o.step()"),
    ),
    "a part that stays in train mode when the model evaluates": (
        "MODE_MISMATCH", 41,
        "class Part(nn.Sequential):\n"
        "    def train(self, mode=True): return super().train()\n"
        "m = nn.Sequential(Part(nn.Linear(6, 12), nn.BatchNorm1d(12)), nn.ReLU(), nn.Linear(12, 1))\n"
        "o = torch.optim.Adam(m.parameters(), lr=1e-2)\n"
        "for i in range(60):\n"
        "    o.zero_grad(); loss_of(m, *draw()).backward(); o.step()\n"
        "    if i % 20 == 19:\n"
        "        m.eval()\n"
        "        with torch.no_grad(): m(draw()[0])\n"
        "        m.train()",
        ("super().train()", "super().train(mode)"),
    ),
    "autocast around the batch": (
        "AUTOCAST_NOT_APPLIED", 10,
        "for i in range(20):\n"
        "    with torch.autocast('cpu', dtype=torch.bfloat16):\n"
        "        x, y = draw()\n"
        "    out = m(x)\n"
        "    loss = (out.float() - y).pow(2).mean(); o.zero_grad(); loss.backward(); o.step()",
        ("    out = m(x)", "        out = m(x)"),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_make_it_is_told_once_and_early(way):
    code, latest, program, (wrong, right) = WAYS[way]
    assert wrong in program
    told = [f for f in watched(HEAD + program)[0] if f.code == code]
    assert len(told) == 1
    assert told[0].step is not None
    assert told[0].step <= latest
    assert [f.code for f in watched(HEAD + program.replace(wrong, right))[0]] == []


@pytest.mark.parametrize(("used", "told"), [("h", []), ("p.detach() + h", ["NO_GRADIENT_ARRIVES"])])
def test_what_a_library_gives_besides_is_no_part_that_is_cut_off(used, told, tmp_path, monkeypatch):
    """An encoder of a library gives states and a pooled one; who takes the states alone leaves the pooler untrained. In code of
    the program the same is a mistake."""
    code = (
        "from torch import nn\n"
        "class Encoder(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.body, self.pooler = nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())\n"
        "    def forward(self, x):\n"
        "        h = self.body(x).relu()\n"
        "        return h, self.pooler(h)\n"
    )
    folder = tmp_path / ("site-packages" if not told else "mine")
    folder.mkdir()
    (folder / f"encoder_of_{len(told)}.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    encoder, head = importlib.import_module(f"encoder_of_{len(told)}").Encoder(), nn.Linear(8, 1)
    model = nn.ModuleList([encoder, head])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    watcher = MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True)
    for step in range(30):
        with watcher.step(step):
            h, p = encoder(torch.randn(4, 6))
            loss = head(eval(used, {"h": h, "p": p})).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watcher.close()
    assert [f.code for f in watcher.findings if f.severity > Severity.INFO] == told
