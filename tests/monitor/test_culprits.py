"""Who is blamed when one place is broken: a traced step names the module, an untraced one may be vague but never wrong."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from training import Apply, autocast, watch

from nanny import Finding, MixedPrecisionNanny, Severity
from nanny.core.step import Autopsy
from nanny.diagnose.choose import diagnoses_of
from nanny.monitor.loss_graph import first_nonfinite, hidden_nonfinite

FP16 = torch.float16
INF = math.inf


class Body(nn.Module):
    """A module whose forward is the given function of itself and its input."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


@dataclass(frozen=True)
class Case:
    model: nn.Module
    site: str  # as a traced step must name it
    ops: tuple[str, ...]  # one of these may be named on an untraced step
    codes: tuple[str, ...] = ("NAN",)
    batch: Any = None
    loss: Callable[[Tensor], Tensor] = lambda out: out.float().mean()
    amp: torch.dtype | None = None


def around(inner: nn.Module) -> Body:
    return Body(lambda s, x: s.head(s.inner(s.pre(x))), pre=nn.Linear(8, 8), inner=inner, head=nn.Linear(8, 1))


def heads(function: Callable[..., Any]) -> Body:
    return Body(function, q=nn.Linear(8, 8), k=nn.Linear(8, 8), v=nn.Linear(8, 8))


def attention(s: Body, x: Tensor) -> Tensor:
    return ((s.q(x) * 3000) @ (s.k(x) * 3000).T).softmax(-1) @ s.v(x)


class Cell(nn.Module):
    """Breaks at its fifth call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 8), 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        h = torch.tanh(self.inner(h))
        return torch.sqrt(h - 5) if self.calls % 6 == 5 else h


def recur(s: Body, x: Tensor) -> Tensor:
    for _ in range(6):
        x = s.cell(x)
    return s.head(x)


def with_nan(module: nn.Module, parameter: str) -> nn.Module:
    with torch.no_grad():
        getattr(module, parameter)[0, 0] = math.nan
    return module


def checkpointed(reentrant: bool) -> Body:
    inner = nn.Sequential(nn.Linear(8, 8), Apply(lambda x: torch.log(-x.abs())))
    return Body(
        lambda s, x: s.head(checkpoint(s.inner, s.pre(x), use_reentrant=reentrant)), pre=nn.Linear(8, 8), inner=inner,
        head=nn.Linear(8, 1),
    )  # fmt: skip


def both_halves(s: Body, x: Tensor) -> Tensor:
    return s.head(s.a(x) + s.b(x))


def lstm_of_rows(s: Body, x: Tensor) -> Tensor:
    return s.head(s.lstm(x[None])[0])


def through_a_dict(s: Body, x: Tensor) -> Tensor:
    return s.c(s.b(s.a(x))["h"])


torch.manual_seed(0)
LOG_OF_NEGATIVE = Apply(lambda x: torch.log(-x.abs()))
FORTY_THOUSAND = Apply(lambda x: (x * 0 + 4e4).half())
X = torch.randn(4, 8)
FULL = torch.ones(4, 8, dtype=torch.bool)
CASES = {
    "scores of a functional attention overflow": Case(around(heads(attention)), "inner", ("mm",), ("OVERFLOW", "NAN"), amp=FP16),
    "log between two children": Case(
        around(Body(lambda s, x: s.b(torch.log(-s.a(x).abs())), a=nn.Linear(8, 8), b=nn.Linear(8, 8))), "inner", ("log",)
    ),
    "division by zero in place": Case(around(Apply(lambda x: x.clone().div_(0))), "inner", ("div",), ("INF",)),
    "exp in fp32": Case(around(Apply(lambda x: torch.exp(x * 1000))), "inner", ("exp",), ("INF",)),
    "a checkpointed part": Case(checkpointed(False), "inner.1", ("log",)),
    "the fifth call of a cell": Case(Body(recur, cell=Cell(), head=nn.Linear(8, 1)), "cell", ("sqrt",)),
    "a weight of an lstm": Case(
        Body(lstm_of_rows, lstm=with_nan(nn.LSTM(8, 8, batch_first=True), "weight_hh_l0"), head=nn.Linear(8, 1)),
        "lstm", (), ("WEIGHT_NONFINITE",),
    ),
    "a row of an embedding": Case(
        Body(lambda s, x: s.head(s.table(x)), table=with_nan(nn.Embedding(5, 8), "weight"), head=nn.Linear(8, 1)),
        "table", ("embedding",), ("WEIGHT_NONFINITE", "NAN"), batch=torch.tensor([0, 3]),
    ),
    "in-place relu behind the producer": Case(
        nn.Sequential(nn.Linear(8, 8), LOG_OF_NEGATIVE, nn.ReLU(inplace=True), nn.Linear(8, 1)), "1", ("log",)
    ),
    "a dict between modules": Case(
        Body(
            through_a_dict, a=nn.Linear(8, 8), b=Apply(lambda x: {"h": torch.log(-x.abs()), "z": x}), c=nn.Linear(8, 1)
        ),
        "b", ("log",),
    ),
    "minus infinity times zero": Case(
        nn.Sequential(nn.Linear(8, 8), Apply(lambda x: torch.log(x * 0)), Apply(lambda x: x * 0), nn.Linear(8, 1)),
        "2", ("mul", "log"), ("NAN", "INF"),
    ),
    "a residual sum overflows": Case(
        Body(both_halves, a=FORTY_THOUSAND, b=copy.deepcopy(FORTY_THOUSAND), head=nn.Linear(8, 1)),
        "Body", ("add",), ("OVERFLOW", "NAN", "INF"), batch=X.clone().requires_grad_(), amp=FP16,
    ),
    "zero by zero": Case(around(Apply(lambda x: (x * 0) / (x * 0))), "inner", ("div",)),
    "standard deviation of one row": Case(
        around(Apply(lambda x: (x - x.mean(0)) / x.std(0))), "inner", ("std", "div"), batch=X[:1]
    ),
    "a fully masked softmax": Case(
        around(Body(lambda s, x: s.soft(x.masked_fill(FULL, -INF)), soft=nn.Softmax(-1))), "inner.soft", ("softmax",)
    ),
    "a constant that is nan": Case(
        Body(lambda s, x: s.head(x) - s.other(x).detach().log(), head=nn.Linear(8, 1), other=Apply(lambda x: -x[:, :1].abs())),
        "Body", ("sub", "mean"),
    ),
    "the loss divides by zero": Case(
        around(nn.Identity()), "loss", ("div",), ("NAN", "INF"), loss=lambda out: out.mean() / (out * 0).sum()
    ),
    "the loss sums in fp16": Case(
        around(nn.Identity()), "loss", ("sum",), ("OVERFLOW", "INF"), loss=lambda out: (out.half() * 0 + 3e4).sum()
    ),
    "the loss takes the log of zero": Case(
        around(nn.Identity()), "loss", ("log", "neg"), ("INF", "NAN"),
        loss=lambda out: -torch.log(1 - torch.sigmoid((out.abs() * 100 + 50).half())).mean(),
    ),
}  # fmt: skip


def blamed(case: Case, traced: bool) -> Finding:
    model = copy.deepcopy(case.model)
    optimizer = SGD(model.parameters(), lr=1e-4)
    nanny = watch(model, optimizer, interval=1 if traced else 100)
    if not traced:  # the first step is always traced: give it nothing to see
        nanny.begin_step(0)
        nanny.end_step()
    with nanny.step(1):
        with autocast(case.amp):
            loss = case.loss(model(X if case.batch is None else case.batch))
        loss.backward()
    nanny.close()
    assert not math.isfinite(float(loss.detach()))
    errors = [f for f in nanny.findings if f.severity is Severity.ERROR]
    assert len(errors) == 1, errors
    return errors[0]


@pytest.mark.parametrize("name", CASES)
def test_a_traced_step_names_the_module_that_broke(name):
    case = CASES[name]
    finding = blamed(case, traced=True)
    assert finding.code in case.codes
    if case.site == "loss":
        assert finding.site == "loss" or finding.site in {f"op:{op}" for op in case.ops}
    else:
        assert finding.site == case.site


@pytest.mark.parametrize("name", CASES)
def test_an_untraced_step_names_the_operation_or_nobody(name):
    case = CASES[name]
    finding = blamed(case, traced=False)
    assert finding.code in case.codes or finding.code == "NAN"
    allowed = {"loss", case.site, *(f"op:{op}" for op in case.ops)}
    assert finding.site in allowed, finding.message


def test_a_number_that_the_loss_hides_is_read_from_what_backward_has_not_reached():
    """Where a step cannot be run again: in the midst of backward, from the hook of the first bad gradient."""
    keys, values = nn.Linear(4, 3), nn.Linear(4, 3)
    names = {id(p): f"{name}.{n}" for name, layer in (("keys", keys), ("values", values)) for n, p in layer.named_parameters()}
    x = torch.ones(2, 4)
    empty = torch.tensor([[False], [True]])

    def told(fill: float) -> list[Autopsy | None]:
        attended = keys(x).masked_fill(empty, fill).softmax(-1) * values(x)
        loss = attended.masked_fill(empty, 0.0).square().sum()
        assert loss.isfinite()
        seen: list[Autopsy | None] = []
        hook = values.bias.register_post_accumulate_grad_hook(lambda _: seen.append(hidden_nonfinite(loss.grad_fn, names)))
        loss.backward()
        hook.remove()
        return seen

    (found,) = told(-math.inf)
    assert found is not None
    assert (found.op, found.nan, found.sure) == ("softmax", True, True)
    assert told(-1e4) == [None]


@pytest.mark.parametrize("after", [lambda total: total / 64 * 1e-3, lambda total: total * 0.5, lambda total: total / 3.0])
def test_what_only_makes_a_number_smaller_is_not_who_made_it_infinite(after):
    """The sum keeps nothing; the factor behind it is on record, and cannot have done it."""
    x = torch.full((64, 16), 100.0, dtype=torch.float16, requires_grad=True)
    found = first_nonfinite(after((x * x).sum()), {})
    assert found is not None
    assert (found.op, found.nan) == ("sum", False)
    target = torch.full((4,), math.inf)
    loss = (torch.ones(4, requires_grad=True) - target).abs().mean() * 256.0  # the loss scale
    assert first_nonfinite(loss, {}).op != "mul"
    larger = first_nonfinite(torch.full((4,), 300.0, dtype=torch.float16, requires_grad=True).sum() * 1e4, {})
    assert larger is not None
    assert larger.op == "mul"


@pytest.mark.parametrize("labelled", [0.0, 3.0])
def test_a_division_by_exactly_nothing_is_told_from_what_it_kept(labelled):
    """The function that computed the loss has returned: its line cannot be made again."""
    layer = nn.Linear(4, 1)
    active = torch.zeros(3, 1)
    active[0] = labelled
    loss = (layer(torch.ones(3, 4)) * active).sum() / active.sum()
    found = first_nonfinite(loss / 1, {id(layer.weight): "weight"})
    assert found is not None
    assert found.by_zero is (labelled == 0)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_batch_is_blamed_for_what_was_added_only_if_that_is_read_from_it(is_read):
    """The graph has kept neither operand; a number of the batch that nobody reads may be bad as well."""
    model, bad = nn.Linear(4, 1), torch.tensor([math.nan])
    rows = [{"x": torch.ones(4), "y": torch.zeros(1), "unused": torch.ones(2)} for _ in range(6)]
    rows += [{"x": torch.ones(4), "y": bad if is_read else torch.zeros(1), "unused": bad.repeat(2)} for _ in range(2)]
    shift = torch.zeros(1)
    with MixedPrecisionNanny(model, SGD(model.parameters(), 0.01), output_dir=None) as nanny:
        for i, batch in enumerate(DataLoader(rows, batch_size=2)):
            if i == 3 and not is_read:
                shift = bad
            with nanny.step(i):
                x, y = batch["x"], batch["y"]
                (model(x) + y - shift).square().mean().backward()
    found = diagnoses_of(nanny.evidence())[0]
    assert (found.cause, found.confidence > 0.9) == ("data_nan", is_read)


@pytest.mark.parametrize(("empty", "sure"), [(True, False), (False, True)])
def test_an_operation_that_met_minus_infinity_beside_its_graph_has_not_made_it_for_sure(empty, sure):
    """`log(0)` of a target has no gradient, so the graph does not know it; the loss is the first that does."""
    predicted = torch.full((3,), 1e30, requires_grad=True)
    target = torch.tensor([1.0, 0.0 if empty else 2.0, 3.0]).log()
    found = first_nonfinite(nn.functional.mse_loss(predicted, target), {})
    assert found is not None
    assert (found.op, found.sure) == ("mse_loss", sure)
