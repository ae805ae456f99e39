"""PyTorch's own tables of operations, modules and optimizers, each case run plain and under every watcher.

    cd tests
    python -m harmless.tables operations --only linalg --watcher compare    # what differs, one line each, then the counts

A case is one training step: the operation on a sample of the table, its gradients, an SGD update. A case that differs from itself
when it runs twice alone proves nothing about a tool and is left out by that measurement. The tables change settings of the whole
process when they are imported, so tests ask for them in a process of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import math
import os
import pathlib
import subprocess
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
WATCHERS = ("monitor", "sanitize", "naninf", "compare", "watch_model")
PRECISIONS = ("float32", "bfloat16", "float16", "complex64", "autocast")
MOST_SAMPLES = {"float32": 3}  # per operation and type; else 1
MOST_SETTINGS = 3  # of an optimizer
MOST_HEALTHY = 1e4  # no result or gradient of a healthy training is larger
MOST_NUMBERS = 1 << 15  # of a sample
SEED = 20


@dataclass(frozen=True)
class Case:
    """One training step: `build` makes its model anew, `run` does the step and returns everything that came of it."""

    name: str
    precision: str
    build: Callable[[], Any]
    run: Callable[[Any], Any]


@dataclass
class Tally:
    cases: Counter[str] = field(default_factory=Counter)  # watcher -> cases that were compared
    left_out: Counter[str] = field(default_factory=Counter)
    problems: list[tuple[str, str, str, str]] = field(default_factory=list)  # name, precision, watcher, what


def load_tables() -> tuple[Any, Any, Any]:
    """Without installing anything: of `expecttest` torch only takes the base class of its own tests."""
    if "expecttest" not in sys.modules:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.common_optimizers import optim_db

    return op_db, module_db, optim_db


# ---- cases ----


def operation_cases(wanted: Callable[[str], bool], dtypes: tuple[str, ...]) -> Iterator[Case]:
    import torch

    for op in load_tables()[0]:
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        if not wanted(name):
            continue
        for precision in dtypes:
            dtype = torch.float32 if precision == "autocast" else getattr(torch, precision)
            if dtype not in op.dtypes:
                continue
            gradients = dtype in op.backward_dtypes and op.supports_autograd
            torch.manual_seed(SEED)
            try:
                samples = [s for _, s in zip(range(30), op.sample_inputs("cpu", dtype, requires_grad=gradients))]
            except Exception as error:  # noqa: BLE001 - the table cannot make them here (no scipy, no such kernel)
                yield Case(name, precision, lambda error=error: error, lambda error: None)
                continue
            samples = [s for s in samples if _numbers_in(s) <= MOST_NUMBERS]
            step = max(1, -(-len(samples) // MOST_SAMPLES.get(precision, 1)))
            for sample in samples[::step]:
                yield _operation_case(name, precision, op, sample)


def _numbers_in(sample: Any) -> int:
    import torch

    leaves = torch.utils._pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_nested)


def _operation_case(name: str, precision: str, op: Any, sample: Any) -> Case:
    import torch
    from torch import nn

    class OneOperation(nn.Module):
        """Its leaves that want a gradient are its weights."""

        def __init__(self) -> None:
            super().__init__()
            self.leaves = nn.ParameterList()
            self.given = torch.utils._pytree.tree_map(self._copied, (sample.input, sample.args, sample.kwargs))

        def _copied(self, leaf: Any) -> Any:
            if isinstance(leaf, torch.Generator):
                return copy.copy(leaf)
            if not isinstance(leaf, torch.Tensor):
                return leaf
            mine = leaf.detach().clone()
            if not leaf.requires_grad:
                return mine
            self.leaves.append(nn.Parameter(mine))
            return self.leaves[-1]

        def forward(self) -> Any:
            first, args, kwargs = self.given
            return op(first, *args, **kwargs)

    def run(model: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            out = model()
        kept = _tensors((out,))
        results = [t.detach().clone() for t in kept]
        if model.leaves:
            _learn(model, sample.output_process_fn_grad(out))
        return [*results, *model.leaves, *(leaf.grad for leaf in model.leaves), model.given]

    return Case(name, precision, OneOperation, run)


def _learn(model: Any, out: Any, optimizer: Any = None) -> None:
    """Backward from a sum of all outputs, each element with a weight of its own, and an update."""
    import torch

    losses = []
    for tensor in _tensors((out,)):
        if tensor.requires_grad and tensor.layout is torch.strided and not tensor.is_nested:
            weights = torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float32).reshape(tensor.shape)
            weighted = tensor * weights.to(tensor.dtype)
            losses.append((torch.view_as_real(weighted) if weighted.is_complex() else weighted).float().sum())
    if losses:
        torch.stack(losses).sum().backward()
        (optimizer or torch.optim.SGD(model.parameters(), lr=1e-4)).step()


def module_cases(wanted: Callable[[str], bool], dtypes: tuple[str, ...]) -> Iterator[Case]:
    import torch

    for info in load_tables()[1]:
        name = info.name.replace("_", ".")
        for precision in dtypes:
            dtype = torch.float32 if precision == "autocast" else getattr(torch, precision)
            if not wanted(name) or dtype not in info.dtypes:
                continue
            torch.manual_seed(SEED)
            inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=True)
            for one in [given for given in inputs if given.forward_input is not None][: MOST_SAMPLES.get(precision, 1)]:
                yield _module_case(name, precision, info, one, dtype)


def _module_case(name: str, precision: str, info: Any, one: Any, dtype: Any) -> Case:
    import torch

    def build() -> Any:
        made, given = one.constructor_input, one.forward_input
        model = info.module_cls(*made.args, **made.kwargs).to(dtype)
        model.train()
        given = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), (given.args, given.kwargs)
        )
        return types.SimpleNamespace(model=model, given=given)

    def run(made: Any) -> Any:
        args, kwargs = made.given
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            out = made.model(*args, **kwargs)
        results = [t.detach().clone() for t in _tensors((out,))]
        trained = [p for p in made.model.parameters() if p.requires_grad]
        _learn(made.model, out, None if trained else types.SimpleNamespace(step=lambda: None))
        return [
            *results,
            made.model.state_dict(),
            *(p.grad for p in trained),
            *(t.grad for t in _tensors(made.given) if t.is_leaf),
        ]

    return Case(name, precision, build, run)


def optimizer_cases(wanted: Callable[[str], bool], dtypes: tuple[str, ...]) -> Iterator[Case]:
    import torch

    for info in load_tables()[2]:
        name = info.optim_cls.__name__
        if not wanted(name):
            continue
        for precision in set(dtypes) & {"float32", "bfloat16"}:
            for given in info.optim_inputs_func("cpu", torch.float32)[:MOST_SETTINGS]:
                yield _optimizer_case(f"{name} {given.desc}".strip(), precision, info.optim_cls, given)


def _optimizer_case(name: str, precision: str, kind: Any, given: Any) -> Case:
    import torch
    from torch import nn

    sparse = kind is torch.optim.SparseAdam
    dtype = torch.float32 if precision == "autocast" else getattr(torch, precision)

    def build() -> Any:
        torch.manual_seed(SEED)
        first = nn.Embedding(6, 4, sparse=True) if sparse else nn.Linear(4, 4, bias=kind.__name__ != "Muon")
        model = (first if sparse else nn.Sequential(first, nn.Tanh(), nn.Linear(4, 2, bias=False))).to(dtype)
        return types.SimpleNamespace(model=model, optimizer=kind(model.parameters(), **given.kwargs))

    def run(made: Any) -> Any:
        x = torch.arange(6) if sparse else torch.linspace(-1, 1, 12, dtype=dtype).reshape(3, 4)
        losses = []

        def closure() -> Any:
            made.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                loss = made.model(x).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
            return loss

        for _ in range(2):
            made.optimizer.step(closure)
        return [*losses, made.model.state_dict(), made.optimizer.state_dict(), *(p.grad for p in made.model.parameters())]

    return Case(name, precision, build, run)


def quick_cases(wanted: Callable[[str], bool], precisions: tuple[str, ...]) -> Iterator[Case]:
    """A few operations that have a way of their own, written out: the import of the tables alone takes seconds."""
    import torch
    import torch.nn.functional as F
    from torch import linalg

    torch.manual_seed(SEED)
    square, tall, image, rows = torch.randn(4, 4), torch.randn(5, 3), torch.randn(2, 3, 6, 6), torch.randn(6, 8)
    zeros, complex_ = torch.zeros(3), torch.randn(3, 3, dtype=torch.complex64)
    labels, places = torch.tensor([1, 0, 3, 2, 1, 0]), torch.tensor([0, 2, 0])
    lengths = torch.tensor([6, 5]), torch.tensor([2, 1])
    table: dict[str, tuple[Callable[..., Any], Any]] = {
        "matmul": (torch.matmul, (square, square)),
        "complex matmul": (torch.matmul, (complex_, complex_)),
        "eig": (lambda a: linalg.eig(a).eigenvalues.abs(), (square,)),
        "eigh": (lambda a: linalg.eigh(a + a.mT)[1].square(), (square,)),
        "svd": (lambda a: linalg.svd(a, full_matrices=False)[1], (tall,)),
        "qr": (lambda a: linalg.qr(a)[1].abs(), (tall,)),
        "solve": (linalg.solve, (square, square)),
        "norm of zero": (linalg.norm, (zeros,)),
        "cumprod of zero": (lambda a: torch.cumprod(a * 0, 0), (zeros,)),
        "sgn": (torch.sgn, (complex_,)),
        "ctc_loss": (
            lambda x: F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2], [3, 1]]), *lengths),
            (torch.randn(6, 2, 4),),
        ),
        "cross_entropy": (lambda x: F.cross_entropy(x, labels), (rows,)),
        "softmax of a mask": (lambda x: x.masked_fill(rows > 1, -torch.inf).softmax(-1), (rows,)),
        "layer_norm": (lambda x: F.layer_norm(x, (8,)), (rows,)),
        "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (rows,)),
        "conv2d": (F.conv2d, (image, torch.randn(2, 3, 3, 3))),
        "max_pool2d": (lambda x: F.max_pool2d(x, 2), (image,)),
        "attention": (F.scaled_dot_product_attention, tuple(torch.randn(3, 1, 2, 4, 4))),
        "dropout": (F.dropout, (rows,)),
        "embedding": (lambda w: F.embedding(places, w), (rows,)),
        "index_add": (lambda x: x.index_add(0, places, x[:3]), (rows,)),
        "sort": (torch.sort, (rows,)),
    }
    for name, (function, given) in table.items():
        if wanted(name):
            sample = types.SimpleNamespace(
                input=given[0].clone().requires_grad_(), args=given[1:], kwargs={}, output_process_fn_grad=lambda out: out
            )
            yield _operation_case(name, "float32", function, sample)


CASES = {"quick": quick_cases, "operations": operation_cases, "modules": module_cases, "optimizers": optimizer_cases}


# ---- running ----


@dataclass
class Result:
    fingerprint: str = ""
    error: str = ""
    largest: float = 0.0  # infinite if something is NaN
    own_warnings: list[str] = field(default_factory=list)  # of nanny
    other_warnings: list[str] = field(default_factory=list)
    errors_found: list[str] = field(default_factory=list)
    nonfinite_found: list[str] = field(default_factory=list)


def run_case(case: Case, watcher: str = "") -> Result:
    import torch

    torch.manual_seed(SEED)
    made = case.build()
    torch.manual_seed(SEED + 1)
    result = Result()
    state: Any = None
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("always")
        with _watched(watcher, made, result):
            try:
                state = case.run(made)
            except Exception as error:  # noqa: BLE001 - what a case raises alone it must raise watched
                result.error = f"{type(error).__name__}: {error}"[:300]
    hasher = _Hasher()
    hasher.add(state)
    hasher.add(torch.get_rng_state())
    result.fingerprint, result.largest = hasher.text, hasher.largest
    for one in caught:
        kind = one.category.__name__
        text = f"{kind}: {str(one.message).splitlines()[0][:160] if str(one.message) else ''}"
        (result.own_warnings if kind == "NannyWarning" else result.other_warnings).append(text)
    result.other_warnings = sorted(set(result.other_warnings))
    return result


@contextlib.contextmanager
def _watched(watcher: str, made: Any, result: Result) -> Iterator[None]:
    import nanny

    model = getattr(made, "model", made)
    if not watcher:
        yield
    elif watcher in ("monitor", "watch_model"):
        optimizer = getattr(made, "optimizer", None)
        if watcher == "monitor":
            tool: Any = nanny.MixedPrecisionNanny(model, optimizer, output_dir=None, live=False)
            with tool.step(0):
                yield
            tool.close()
        else:
            tool = nanny.watch_model(model)
            yield
            tool.remove()
        result.errors_found = [f"{f.code}: {f.message}" for f in tool.findings if f.severity.name == "ERROR"]
    elif watcher == "sanitize":
        with nanny.sanitize(model) as seen:
            yield
        result.errors_found = [f"{h.kind}: {h.message}" for h in seen.hazards if h.consequence == float("inf")]
    else:
        with nanny.CompareWithCPU() if watcher == "compare" else nanny.NanInfTracker() as tool:
            yield
        result.errors_found = [f"{f.code}: {f.message}" for f in tool.findings if f.severity.name == "ERROR"]
        result.nonfinite_found = [f"{f.code}: {f.message}" for f in tool.findings if f.severity.name != "ERROR"]


class _Hasher:
    """Bits, types, sizes and strides of everything in a value."""

    def __init__(self) -> None:
        import hashlib

        self._hash = hashlib.sha256()
        self.largest = 0.0

    @property
    def text(self) -> str:
        return self._hash.hexdigest()

    def add(self, value: Any) -> None:
        import torch

        if not isinstance(value, torch.Tensor):
            if isinstance(value, dict):
                value = list(value.items())
            elif isinstance(value, torch.Generator):
                value = value.get_state()
            if isinstance(value, (list, tuple)):
                self._note(type(value).__name__, len(value))
                for item in value:
                    self.add(item)
            elif isinstance(value, torch.Tensor):
                self.add(value)
            else:
                self._note(value if isinstance(value, (int, float, str, bool, complex, type(None), torch.dtype)) else type(value))
            return
        value = value.detach()
        self._note(value.dtype, value.layout)
        if value.is_nested:
            self.add(list(value.unbind()))
        elif value.layout is torch.sparse_coo:
            self.add([value.coalesce().indices(), value.coalesce().values()])
        elif value.layout is not torch.strided:
            compressed = value.layout in (torch.sparse_csr, torch.sparse_bsr)
            places = (value.crow_indices(), value.col_indices()) if compressed else (value.ccol_indices(), value.row_indices())
            self.add([*places, value.values()])
        elif value.is_quantized:
            self.add(value.int_repr())
        elif value.is_meta:
            self._note(tuple(value.shape))
        else:
            self._note(tuple(value.shape), value.stride())
            plain = value.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
            if plain.numel() and (plain.is_floating_point() or plain.is_complex()):
                largest = float(plain.abs().double().max())
                self.largest = max(self.largest, largest if largest == largest else math.inf)
            self._hash.update(plain.reshape(-1).view(torch.uint8).numpy(force=True).tobytes() if plain.numel() else b"")

    def _note(self, *facts: Any) -> None:
        self._hash.update(repr(facts).encode())


def _tensors(value: Any) -> list[Any]:
    import torch

    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def try_cases(
    table: str,
    wanted: Callable[[str], bool],
    precisions: tuple[str, ...],
    watchers: tuple[str, ...],
    told: Callable[[str], None] = lambda line: None,
) -> Tally:
    tally = Tally()
    for case in CASES[table](wanted, precisions):
        made = case.build()
        if isinstance(made, Exception):
            tally.left_out[f"no sample: {type(made).__name__}"] += 1
            continue
        _dirty_memory(0x11)
        plain = run_case(case)
        _dirty_memory(0x77)
        again = run_case(case)
        if (plain.fingerprint, plain.error) != (again.fingerprint, again.error):
            tally.left_out["differs when run twice alone"] += 1
            continue
        if plain.error:
            tally.left_out["raises alone"] += 1  # a combination that torch refuses: not what is tested here
            continue
        for watcher in watchers:
            tally.cases[watcher] += 1
            try:
                found = list(problems(case, plain, run_case(case, watcher)))
                if "bits" in found:
                    _dirty_memory(0x33)  # it has become clean by now
                if "bits" in found and run_case(case).fingerprint != plain.fingerprint:
                    tally.left_out["differs when run twice alone"] += 1  # memory that nobody has written
                    break
            except Exception as error:  # noqa: BLE001 - the tool itself failed to open or close
                found = [f"raised: {type(error).__name__}: {error}"]
            for what in found:
                tally.problems.append((case.name, case.precision, watcher, what.replace("\n", " ")[:200]))
                told(" | ".join((table, *tally.problems[-1])))
    return tally


def _dirty_memory(byte: int) -> None:
    """What an operation never writes then differs from run to run."""
    import torch

    used = [torch.full((size,), byte, dtype=torch.uint8) for size in range(16, 4096, 16) for _ in range(4)]
    del used


def problems(case: Case, plain: Result, watched: Result) -> Iterator[str]:
    if plain.error != watched.error:
        yield f"raised: {watched.error}"
    elif plain.fingerprint != watched.fingerprint:
        yield "bits"
    yield from (f"left: {text}" for text in watched.own_warnings)
    yield from (f"warned: {text}" for text in watched.other_warnings if text not in plain.other_warnings)
    if case.precision == "float32":  # beyond MOST_HEALTHY a finding about the training may be right; a wrong operation is not
        healthy = plain.largest < MOST_HEALTHY
        yield from (f"false: {text}" for text in watched.errors_found if healthy or text.startswith("OP_MISMATCH"))
    if math.isfinite(plain.largest):
        yield from (f"false: {text}" for text in watched.nonfinite_found)


def ask(table: str, part: str) -> dict[str, Any]:
    """The tally of one part of a table, from a process of its own."""
    command = [sys.executable, "-X", "faulthandler", "-W", "ignore", "-m", "harmless.tables", table, "--part", part]
    path = os.pathsep.join(os.path.abspath(p) for p in (str(HERE.parent), *sys.path) if p)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"the process died at {ended.stdout[-300:]}: {ended.stderr[-1500:]}"
    tally: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return tally


def is_in_part(name: str, part: str) -> bool:
    number, parts = map(int, part.split("/"))
    return sum(name.encode()) % parts == number


def known_harm() -> dict[tuple[str, str, str, str, str], str]:
    """Lines `table | name | precisions | watchers | kind | reason` of the data file KNOWN_TABLE_HARM, one entry per harm."""
    known = {}
    for line in (HERE / "KNOWN_TABLE_HARM").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            table, name, precisions, watchers, kind, reason = (cell.strip() for cell in line.split("|", 5))
            for precision in precisions.split():
                for watcher in watchers.split():
                    known[table, name, precision, watcher, kind] = reason
    return known


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=CASES)
    parser.add_argument("--only", default="")
    parser.add_argument("--part", default="0/1", help="2/8: every eighth name, from the third on")
    parser.add_argument("--precision", action="append")
    parser.add_argument("--watcher", action="append", choices=WATCHERS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    words = args.only.split(",")

    def wanted(name: str) -> bool:
        return any(w in name for w in words) and is_in_part(name, args.part)

    precisions = tuple(args.precision or PRECISIONS)
    watchers = tuple(args.watcher or WATCHERS)
    tally = try_cases(args.table, wanted, precisions, watchers, told=lambda line: print(line, flush=True))
    print(json.dumps({"cases": tally.cases, "left_out": tally.left_out, "problems": tally.problems}))


if __name__ == "__main__":
    main()
