"""Third round: Python itself is strange: code without a file, classes without a name, little memory, much asked of a module."""

from __future__ import annotations

import dataclasses
import gc
import linecache
import os
import resource
import sys
import threading
import tracemalloc
import types
from typing import Any

import torch
from torch import nn

from ..program import Program, mlp, program, training

SOURCE = """
def forward(self, x):
    y = self.inner(x)
    return (y * y).mean()
"""


def _from_source(filename: str, namespace: dict[str, Any] | None = None, source: str = SOURCE) -> nn.Module:
    """A model whose code claims to come from `filename`."""
    made: dict[str, Any] = namespace if namespace is not None else {}
    exec(compile(source, filename, "exec"), made)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        forward = made["forward"]

    return Model()


def _on(model: nn.Module, **more: Any) -> Program:
    return training(model, lambda i: model(torch.full((2, 8), float("inf") if i == 2 else 1.0)), steps=4, **more)


for _label, _path in (
    ("endless_device", "/dev/zero"),
    ("missing_file", "/nowhere/at/all.py"),
    ("directory", "/"),
    ("empty_name", ""),
    ("notebook_cell", "<ipython-input-3-abc>"),
    ("surrogates", "caf\udce9\udcff.py"),
):

    @program(f"third_code_from_{_label}", "third code")
    def code_from(seed: int, path: str = _path) -> Program:
        return _on(_from_source(path))


@program("third_code_from_a_pipe_nobody_writes", "third code")
def code_from_pipe(seed: int) -> Program:
    os.mkfifo("pipe.py")
    return _on(_from_source(os.path.abspath("pipe.py")), extra=lambda: os.unlink("pipe.py"))


@program("third_code_from_a_huge_binary_file", "third code")
def code_from_binary(seed: int) -> Program:
    with open("huge.py", "wb") as out:
        out.truncate(1 << 30)  # sparse: takes no room on the disk, but all of it in memory
    return _on(_from_source(os.path.abspath("huge.py")), extra=lambda: os.unlink("huge.py"))


@program("third_code_with_a_loader_that_raises", "third code")
def code_with_loader(seed: int) -> Program:
    asked: list[str] = []

    class Loader:
        def get_source(self, name: str) -> str:
            asked.append(name)
            raise ZeroDivisionError("no source for you")

        def __getattr__(self, name: str) -> Any:
            raise ZeroDivisionError(name)

    namespace: dict[str, Any] = {"__name__": 3.5, "__loader__": Loader(), "__spec__": object(), "__file__": None}
    return _on(_from_source("generated.py", namespace))


@program("third_code_without_line_numbers", "third code")
def code_without_lines(seed: int) -> Program:
    model = _from_source("generated.py")
    kind: Any = type(model)
    code = kind.forward.__code__.replace(co_linetable=b"", co_firstlineno=0)
    kind.forward = types.FunctionType(code, {})
    return _on(model)


@program("third_line_cache_emptied_and_patched", "third code")
def cache_patched(seed: int) -> Program:
    model = mlp()
    original = linecache.getline, linecache.getlines

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no lines today")

    def loss(i: int) -> torch.Tensor:
        if i == 0:
            linecache.clearcache()
            linecache.getline = linecache.getlines = refuse
        return model(torch.full((2, 8), float("nan") if i else 1.0)).sum()

    made = training(model, loss)

    def loop(watch: Any) -> None:
        try:
            for i in range(3):
                with watch.step(i):
                    made.step(i)
            watch.close()
        finally:
            linecache.getline, linecache.getlines = original

    made.loop = loop
    return made


class _Nameless(type):
    training = False

    def __getattribute__(cls, name: str) -> Any:
        if _Nameless.training and name in ("__name__", "__qualname__", "__module__"):
            raise RuntimeError("a class without a name")
        return super().__getattribute__(name)

    def __repr__(cls) -> str:
        raise RuntimeError("a class without words")


class _NamelessModule(nn.Module, metaclass=_Nameless):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def __repr__(self) -> str:
        raise RuntimeError("a module without words")

    def extra_repr(self) -> str:
        raise RuntimeError("a module without words")


@program("third_classes_without_names", "third objects")
def nameless(seed: int) -> Program:
    model = nn.Sequential(_NamelessModule(), nn.ReLU(), _NamelessModule())
    made = training(model, lambda i: model(torch.full((2, 8), float("nan") if i == 2 else 1.0)).sum())

    def loop(watch: Any) -> None:
        _Nameless.training = True
        try:
            for i in range(4):
                with watch.step(i):
                    made.step(i)
        finally:
            _Nameless.training = False

    made.loop = loop
    return made


@dataclasses.dataclass(eq=False)
class _DataModule(nn.Module):
    width: int = 8
    rows: Any = None

    def __post_init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(self.width, self.width)
        self.rows = torch.randn(3, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.rows.sum()


class _Slotted(nn.Module):
    __slots__ = ("factor", "never_set")

    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0
        self.inner = _DataModule()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.factor


@program("third_dataclass_and_slotted_modules", "third objects")
def slotted(seed: int) -> Program:
    model = _Slotted()
    return training(model, lambda i: model(torch.ones(2, 8)).sum())


@program("third_module_counts_each_write_and_delete", "third objects")
def counted_writes(seed: int) -> Program:
    counted: list[str] = []

    class Counts(nn.Linear):
        def __setattr__(self, name: str, value: Any) -> None:
            counted.append(name)
            super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            counted.append(f"-{name}")
            super().__delattr__(name)

        def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
            counted.append("hook")
            raise RuntimeError("no hooks here")

    model = nn.Sequential(Counts(8, 8), nn.ReLU())
    return training(model, lambda i: model(torch.ones(2, 8)).sum(), extra=lambda: [c for c in counted if "hook" not in c])


@program("third_children_made_anew_in_each_forward", "third objects")
def children_anew(seed: int) -> Program:
    class Anew(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = nn.Linear(8, 8, bias=False, device="meta")
            inner.weight = self.weight
            self.child = inner
            x = self.child(x)
            del self.child
            return x

    model = Anew()
    return training(model, lambda i: model(torch.ones(2, 8)).sum())


@program("third_computed_weights_are_not_leaves", "third objects")
def computed(seed: int) -> Program:
    class Computed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.source = nn.Parameter(self.weight.detach().clone())
            del self.weight
            self.register_buffer("weight", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight = self.source * 2
            self.weight.retain_grad()
            return super().forward(x)

    model = Computed()
    optimizer = torch.optim.SGD([model.source, model.bias], 0.1)
    return training(model, lambda i: model(torch.ones(2, 8)).sum(), optimizer)


@program("third_registration_hooks_of_everything", "third objects")
def registrations(seed: int) -> Program:
    seen: list[str] = []
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        from torch.nn.modules import module as inside

        handles = [
            inside.register_module_parameter_registration_hook(lambda m, n, p: seen.append(n)),
            inside.register_module_buffer_registration_hook(lambda m, n, b: seen.append(n)),
            inside.register_module_module_registration_hook(lambda m, n, c: seen.append(n)),
            inside.register_module_full_backward_hook(lambda m, gi, go: seen.append(type(m).__name__)),
        ]
        model.add_module("more", nn.Linear(4, 4))
        value = model(torch.ones(2, 8)).sum()
        torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
        for handle in handles:
            handle.remove()
        return value

    return training(model, loss, extra=lambda: seen)


@program("third_state_dict_hooks_and_metadata", "third objects")
def state_hooks(seed: int) -> Program:
    notes: list[Any] = []
    model = mlp()
    model[0].register_state_dict_post_hook(lambda m, state, prefix, meta: notes.append(sorted(state)))
    model[0].register_state_dict_pre_hook(lambda m, prefix, keep: notes.append(prefix))
    model[0].register_load_state_dict_post_hook(lambda m, keys: notes.append(str(keys)))

    def loss(i: int) -> torch.Tensor:
        state = model.state_dict()
        notes.append({k: dict(v) for k, v in state._metadata.items()})  # type: ignore[attr-defined]
        model.load_state_dict(state, assign=i == 1)
        return model(torch.ones(2, 8)).sum()

    return training(model, loss, extra=lambda: notes)


@program("third_conversion_by_swapping_and_overwriting", "third objects")
def conversions(seed: int) -> Program:
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        try:
            torch.__future__.set_swap_module_params_on_conversion(i == 1)
            torch.__future__.set_overwrite_module_params_on_conversion(i == 2)
            model.to(torch.float64 if i % 2 else torch.float32)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
            torch.__future__.set_overwrite_module_params_on_conversion(False)
        x = torch.ones(2, 8, dtype=model[0].weight.dtype)
        return model(x).square().mean()

    return training(model, loss, torch.optim.SGD(model.parameters(), 0.1), steps=3)


@program("third_shared_memory_from_the_second_step_on", "third objects")
def shared_memory(seed: int) -> Program:
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        if i == 1:
            model.share_memory()
        return model(torch.ones(2, 8)).square().mean()

    return training(model, loss, steps=4, extra=lambda: [p.is_shared() for p in model.parameters()])


@program("third_module_imported_from_a_package", "third objects")
def packaged(seed: int) -> Program:
    from torch import package

    with package.PackageExporter("model.pt") as out:
        out.save_source_string(
            "inner",
            "import torch\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n        return super().forward(x).relu()\n",
        )
        out.extern("torch.**")
    kind = package.PackageImporter("model.pt").import_module("inner").Net
    os.unlink("model.pt")
    model = nn.Sequential(kind(8, 8), kind(8, 4))
    return training(model, lambda i: model(torch.full((2, 8), float("nan") if i == 2 else 1.0)).sum(), steps=4)


@program("third_memory_is_short", "third process")
def short_memory(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64))
    made = training(model, lambda i: model(torch.ones(8192, 64) * (float("nan") if i == 3 else 1)).square().mean(), steps=5)

    def loop(watch: Any) -> None:
        before = resource.getrlimit(resource.RLIMIT_AS)
        try:
            for i in range(5):
                if i == 1:
                    with open("/proc/self/statm") as lines:
                        size = int(lines.read().split()[0]) * resource.getpagesize()
                    resource.setrlimit(resource.RLIMIT_AS, (size + (130 << 20), before[1]))
                with watch.step(i):
                    value = made.step(i)
                made.see(value)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    made.loop = loop
    return made


@program("third_switch_interval_tiny_with_busy_threads", "third process")
def switching(seed: int) -> Program:
    model = mlp()
    made = training(model, lambda i: model(torch.ones(2, 8) * i).square().mean(), steps=6)

    def loop(watch: Any) -> None:
        done = threading.Event()

        def churn() -> None:
            while not done.is_set():
                things = [nn.Linear(2, 2) for _ in range(5)]
                torch.optim.SGD(things[0].parameters(), 0.1).zero_grad()
                with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                    things[1](torch.ones(1, 2))
                next(iter(torch.utils.data.DataLoader([1, 2])))
                gc.collect(0)

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        state = torch.get_rng_state()
        thread = threading.Thread(target=churn)
        thread.start()
        try:
            for i in range(6):
                with watch.step(i):
                    value = made.step(i)
                made.see(value)
        finally:
            done.set()
            thread.join()
            sys.setswitchinterval(before)
            torch.set_rng_state(state)

    made.loop = loop
    return made


@program("third_tracemalloc_and_thread_profiles", "third process")
def traced_memory(seed: int) -> Program:
    model = mlp()
    made = training(model, lambda i: model(torch.ones(2, 8)).square().mean())

    def loop(watch: Any) -> None:
        tracemalloc.start(2)
        threading.setprofile(lambda *args: None)
        try:
            for i in range(3):
                with watch.step(i):
                    value = made.step(i)
                made.see(value)
            tracemalloc.take_snapshot()
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]
            tracemalloc.stop()

    made.loop = loop
    return made


@program("third_exit_inside_step_is_caught_outside", "third process")
def exits(seed: int) -> Program:
    model = mlp()
    made = training(model, lambda i: model(torch.ones(2, 8)).square().mean())
    notes: list[Any] = []

    def loop(watch: Any) -> None:
        for i in range(4):
            try:
                with watch.step(i):
                    made.step(i)
                    if i == 1:
                        sys.exit(7)
                    if i == 2:
                        raise GeneratorExit
            except (SystemExit, GeneratorExit) as error:
                notes.append((type(error).__name__, error.__context__ is None, error.__cause__ is None, error.args))

    made.loop, made.extra = loop, lambda: notes
    return made
