"""Whatever function of ours raises, at whatever moment: the training stands, one warning is given, nothing is left behind.

Functions are found by looking, not by a list: each one of `watch`, `measure`, `examine` and `monitor` is replaced, wherever it
was imported to, by one that raises.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import io
import pkgutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import nanny
from nanny.core.finding import NannyWarning

from . import leftovers
from .program import bits

ROOMS = ("watch", "measure", "examine", "monitor")
STEPS = 4
# The guards themselves: torch, or the user, calls them, and nobody stands in between. They hold no more than a `try`.
GUARDS = {
    "watch.op_stream._OpStream.__init__",
    "watch.op_stream._OpStream.__torch_dispatch__",
    "watch.op_stream._OpStream._should_skip_dynamo",
    "watch.op_stream._OpStream._failed",
    "watch.op_stream._run",  # the program's own operation
    "watch.calls._catch",
    "watch.calls._hear",
    "watch.calls._is_over",
    "watch.events._ignore",
    "watch.events.PartListener.__getattr__",
    "watch.events._tell_compiled",
    "watch.events._put_back",  # these put back
    "watch.events._uninstall",
    "watch.events.leave",
    "watch.compiler.unregister",
    "watch.compiler._Door.close",
    "watch.compiler.ModuleHooks.close",
    "watch.compiler.ModuleHooks.go_aside",
    "watch.op_stream.leave",
    "watch.op_stream._OpStream.pop",
    "watch.op_stream._OpStream.is_on",
    "watch.op_stream._Unseen.__exit__",
    "watch.tensors.outside_program.__exit__",
    "watch.twins.Twins.__exit__",
    "watch.places.Places.close",
    "examine.sanitizer.Sanitizer._unhook",
    "examine.sanitizer.Sanitizer.close",
    "examine.sanitizer.Sanitizer._guard",
    "examine.sanitizer.Sanitizer._on_gradient",
    "examine.sanitizer.Sanitizer._on_input",
    "examine.sanitizer.Sanitizer._on_output",
    "monitor.recording.RunRecording.close",
    "monitor.recorder.Recorder.run",
    "monitor.recorder.Recorder.run_hook",
    "monitor.recorder.Recorder.failed",
    "monitor.trace.StepTrace._after_forward",
    "monitor.trace.StepTrace._after_backward",
    "monitor.watch.Framed.__init__",  # the user calls these, and they call what is guarded
    "monitor.watch.Framed.__enter__",
    "monitor.watch.Framed.__exit__",
    "monitor.watch.MixedPrecisionNanny._attempt",
    "monitor.watch.MixedPrecisionNanny._failed",
}
QUICK = (
    "examine.sanitizer.Sanitizer.open",
    "measure.rows.pack_gradients",
    "monitor.capture.StepCapture.finish",
    "monitor.examiner.Examiner.open",
    "monitor.recorder.Recorder.before_backward",
    "monitor.recording.RunRecording.__init__",
    "monitor.trace.StepTrace._forward",
    "watch.events._install",
    "watch.twins.Twins.after",
)


def modules() -> Iterator[ModuleType]:
    for room in ROOMS:
        package = importlib.import_module(f"nanny.{room}")
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(found.name)


def test_every_guard_is_there() -> None:
    for name in GUARDS:
        pkgutil.resolve_name(f"nanny.{name}")  # raises where it is not


def own_functions() -> dict[str, tuple[Any, str]]:
    """`room.module.function` or `room.module.Class.method`, with its owner and name."""
    found: dict[str, tuple[Any, str]] = {}
    for module in modules():
        short = module.__name__.removeprefix("nanny.")
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(value):
                found[f"{short}.{name}"] = (module, name)
            elif inspect.isclass(value):
                found |= {f"{short}.{name}.{method}": (value, method) for method in _methods(value)}
    public = ("monitor.watch.MixedPrecisionNanny.", "monitor.watch_lightly.Watch.", "examine.run.", "monitor.command.")
    called_by_the_user = {"monitor.watch.examine", "monitor.watch_lightly.watch_model", "monitor.watch_lightly.check_loss_scale"}
    return {
        name: place
        for name, place in found.items()
        if name not in GUARDS | called_by_the_user
        and not (name.startswith(public) and not name.rpartition(".")[2].startswith("_"))
        and not (name.startswith(public) and name.rpartition(".")[2].startswith("__"))
    }


def _methods(kind: type) -> list[str]:
    kept = ("__init__", "__enter__", "__exit__", "__call__", "__getattr__")
    made = "__dataclass_fields__" in vars(kind) or "_fields" in vars(kind)
    by_python = ("__init__", "_make", "_replace", "_asdict") if made else ()
    functions = [name for name, value in vars(kind).items() if inspect.isfunction(value) and name not in by_python]
    return [name for name in functions if name in kept or not name.startswith("__")]


@contextlib.contextmanager
def raising(owner: Any, name: str) -> Iterator[list[int]]:
    """Replaces a function everywhere by one that raises; gives how often it was called."""
    original = vars(owner)[name]
    calls = [0]

    def raises(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        raise ZeroDivisionError(f"{name} was made to fail")

    places = [(owner, name)]
    if isinstance(owner, ModuleType):
        for module in [m for n, m in sys.modules.items() if n.startswith("nanny.") and m is not owner]:
            places += [(module, known) for known, value in vars(module).items() if value is original]
    for place, known in places:
        setattr(place, known, raises)
    try:
        yield calls
    finally:
        for place, known in places:
            setattr(place, known, original)


def train(watch: Callable[[nn.Module, Any], Any] | None) -> tuple[Any, list[nn.Module], list[Any]]:
    """Healthy steps under autocast, then one whose input is infinite."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    watcher = None if watch is None else watch(model, optimizer)
    losses = []
    for i in range(STEPS):
        x = torch.full((2, 4), float("inf")) if i == 2 else torch.randn(2, 4)
        with contextlib.nullcontext() if watcher is None else watcher.step(i):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        losses.append(loss.detach())
    if watcher is not None:
        watcher.close()
    return bits([losses, model.state_dict(), optimizer.state_dict(), torch.get_rng_state()]), [model], [optimizer]


def watched(folder: str) -> Callable[[nn.Module, Any], Any]:
    return lambda model, optimizer: nanny.MixedPrecisionNanny(model, optimizer, output_dir=folder)


def harm_of(owner: Any, name: str, plain: Any, must_run: bool = False) -> list[str]:
    functions, before = leftovers.functions(), leftovers.surroundings()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        warnings.catch_warnings(record=True) as caught,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("always")
        with raising(owner, name) as calls:
            try:
                state, models, optimizers = train(watched(folder))
            except Exception as error:  # noqa: BLE001 - it is what must not happen
                return [f"raised {type(error).__name__}: {error}"]
    found = ["it was never called"] if must_run and not calls[0] else []
    found += [] if state == plain[0] else ["other bits"]
    found += [] if leftovers.marks(models, optimizers) == plain[1] else ["marks on the model"]
    del models, optimizers
    gc.collect()
    ours = [w for w in caught if issubclass(w.category, NannyWarning)]
    found += [f"{len(ours)} warnings: {[str(w.message) for w in ours]}"] if len(ours) > 1 else []
    found += [f"warned: {w.message}" for w in caught if not issubclass(w.category, NannyWarning)]
    after = leftovers.surroundings()
    found += [f"{key}: {before[key]} -> {after[key]}" for key in before if before[key] != after[key]]
    return found + leftovers.replaced(functions)


@pytest.fixture(scope="module")
def plain() -> Iterator[Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, contextlib.redirect_stderr(io.StringIO()):
        train(watched(folder))  # what is imported and replaced by torch at the first time
    state, models, optimizers = train(None)
    marks = leftovers.marks(models, optimizers)
    del models, optimizers
    gc.collect()
    gc.freeze()  # torch alone is a million objects; from here on a collection is cheap
    yield state, marks
    gc.unfreeze()


OWN = own_functions()


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", QUICK)
def test_training_stands_when_one_of_these_raises(name: str, plain: Any) -> None:
    owner, attribute = OWN[name]
    assert harm_of(owner, attribute, plain, must_run=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("module", sorted({name.rpartition(".")[0] for name in OWN}))
def test_training_stands_whichever_function_raises(module: str, plain: Any) -> None:
    harmed = {name: harm_of(*OWN[name], plain) for name in OWN if name.rpartition(".")[0] == module and name not in QUICK}
    assert {name: texts for name, texts in harmed.items() if texts} == {}
