"""Third round: loaders that are strange, autocast used strangely, and the objects that merely lie about in the process."""

from __future__ import annotations

import contextlib
import gc
import pickle
import queue
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data import dataloader as loaders

from ..program import Program, mlp, program, training


class _Rows(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((8,), float(i) / 7)


class _Stream(IterableDataset):
    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        i = info.id if info else 0
        while True:
            if i == self.fails_at:
                raise ValueError(f"row {i} is rotten")
            yield torch.full((8,), float(i) / 5)
            i += info.num_workers if info else 1


def _over(loader: Any, model: nn.Module | None = None, **more: Any) -> Program:
    model = model or mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    made = Program([model], [optimizer], lambda i: None, **more)

    def loop(watch: Any) -> None:
        for i, batch in enumerate(loader):
            with watch.step(i):
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
            made.see(loss)
            if i == 3:
                break

    made.loop = loop
    return made


@program("third_loader_iterator_used_beyond_close", "third data")
def beyond_close(seed: int) -> Program:
    made = training(mlp(), lambda i: made.models[0](torch.ones(2, 8)).sum())
    notes: list[Any] = []

    def loop(watch: Any) -> None:
        rows = iter(DataLoader(_Rows(), 2))
        following, of_class = rows.__next__, type(rows).__next__
        with watch.step(0):
            notes.append(following())
            made.step(0)
        watch.close()
        notes.append(following())
        notes.append(of_class(rows))
        notes.append([next(rows, None) for _ in range(5)])
        notes.append("__next__" in vars(type(rows)))

    made.loop, made.extra = loop, lambda: notes
    return made


@program("third_loader_next_replaced_inside_and_put_back", "third data")
def next_replaced(seed: int) -> Program:
    counted: list[int] = []
    rows = iter(DataLoader(_Rows(), 2))
    model = mlp()
    kept: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        kind: Any = loaders._BaseDataLoaderIter
        if i == 0:
            kept.append(kind.__next__)

            def counting(self: Any) -> Any:
                counted.append(1)
                return kept[0](self)

            kind.__next__ = counting
        batch = next(rows)
        if i == 2:
            kind.__next__ = kept[0]
        return model(batch).square().mean()

    return training(model, loss, extra=lambda: counted)


@program("third_loader_worker_error_with_its_traceback", "third data")
def worker_error(seed: int) -> Program:
    notes: list[Any] = []
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        for workers in (0, 1):
            try:
                list(DataLoader(_Stream(fails_at=2), 1, num_workers=workers))
            except ValueError as error:
                names = [f.name for f in traceback.extract_tb(error.__traceback__)]
                notes.append((str(error).splitlines()[0][:40], "row 2 is rotten" in str(error), names[0], names[-1]))
        return model(torch.ones(2, 8)).sum()

    return training(model, loss, steps=2, extra=lambda: notes)


class _NoWeak:
    __slots__ = ("rows",)

    def __init__(self, rows: Any) -> None:
        self.rows = rows


class _Touchy:
    """Whoever looks inside is noticed."""

    touched = 0

    def __init__(self, rows: Any) -> None:
        object.__setattr__(self, "rows", rows)

    def __getattribute__(self, name: str) -> Any:
        if name != "rows":
            _Touchy.touched += 1
        return object.__getattribute__(self, name)

    def __iter__(self) -> Any:
        raise RuntimeError("not to be iterated")

    def __len__(self) -> int:
        raise RuntimeError("not to be measured")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = None  # type: ignore[assignment]


@program("third_loader_batches_of_odd_kinds", "third data")
def odd_batches(seed: int) -> Program:
    rows = torch.randn(2, 8)
    kinds: list[Any] = [
        None, "text", b"bytes", 7, float("nan"), [], {}, _NoWeak(rows), _Touchy(rows), iter([rows]), (x for x in [rows]),
        {"x": rows, 3: object()}, torch.nested.nested_tensor([rows[0], rows[1, :3]]), rows.to_sparse(), rows.to("meta"),
    ]  # fmt: skip
    _Touchy.touched = 0
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made = Program([model], [optimizer], lambda i: None, extra=lambda: _Touchy.touched)

    def loop(watch: Any) -> None:
        for i, batch in enumerate(DataLoader(kinds, batch_size=None, collate_fn=lambda x: x)):  # type: ignore[arg-type]
            with watch.step(i):
                optimizer.zero_grad()
                model(rows + i).sum().backward()
                optimizer.step()
            if isinstance(batch, (Iterator, type(iter([])))):
                made.see(list(batch))

    made.loop = loop
    return made


@program("third_loader_iterator_class_of_the_user", "third data")
def own_iterator(seed: int) -> Program:
    notes: list[Any] = []

    class Iter(loaders._SingleProcessDataLoaderIter):
        def __next__(self) -> Any:
            notes.append("own")
            return super().__next__() * 2

        def _next_data(self) -> Any:
            if len(notes) == 3:
                raise KeyError("third")
            return super()._next_data()

    class Loader(DataLoader):
        def _get_iterator(self) -> Any:
            return Iter(self)

    made = _over(Loader(_Rows(), 2), extra=lambda: notes)
    inner = made.loop

    def loop(watch: Any) -> None:
        try:
            inner(watch)
        except KeyError as error:
            notes.append([f.name for f in traceback.extract_tb(error.__traceback__)][-2:])

    made.loop = loop
    return made


@program("third_loader_persistent_workers_and_infinite_stream", "third data")
def persistent(seed: int) -> Program:
    loader = DataLoader(_Stream(), 2, num_workers=1, persistent_workers=True, prefetch_factor=2)
    return _over(loader)


@program("third_loader_batches_die_when_dropped", "third data")
def batches_die(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    alive: list[int] = []
    made = Program([model], [optimizer], lambda i: None, extra=lambda: alive)

    def loop(watch: Any) -> None:
        gc.disable()
        try:
            seen: list[Any] = []
            rows = iter(DataLoader(_Rows(), 2))
            for i in range(5):
                batch = next(rows)
                seen.append(weakref.ref(batch))
                with watch.step(i):
                    optimizer.zero_grad()
                    model(batch).sum().backward()
                    optimizer.step()
                del batch
                alive.append(sum(ref() is not None for ref in seen))
            dead = weakref.ref(rows)
            del rows
            alive.append(dead() is not None)
        finally:
            gc.enable()

    made.loop = loop
    return made


@program("third_loader_pinned_and_out_of_order", "third data")
def pinned(seed: int) -> Program:
    return _over(DataLoader(_Rows(), 3, pin_memory=True, num_workers=1, in_order=False, timeout=60))


@program("third_loader_prefetched_by_a_thread", "third data")
def prefetched(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made = Program([model], [optimizer], lambda i: None)

    def loop(watch: Any) -> None:
        waiting: queue.Queue[Any] = queue.Queue(2)

        def fill() -> None:
            for batch in DataLoader(_Rows(), 2):
                waiting.put(batch)
            waiting.put(None)

        thread = threading.Thread(target=fill)
        thread.start()
        i = 0
        while (batch := waiting.get()) is not None:
            with watch.step(i):
                optimizer.zero_grad()
                loss = model(batch).sum()
                loss.backward()
                optimizer.step()
            made.see(loss)
            i += 1
        thread.join()

    made.loop = loop
    return made


@program("third_loader_inside_forward_and_nested", "third data")
def nested_loaders(seed: int) -> Program:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for one in DataLoader(_Rows(), 6, shuffle=True):
                for two in DataLoader(TensorDataset(one), 3):
                    x = x + self.inner(two[0]).sum(0)
            return x

    model = Reads()
    return training(model, lambda i: model(torch.ones(2, 8)).square().mean())


@program("third_batch_changed_in_place_after_it_came", "third data")
def batch_changed(seed: int) -> Program:
    rows = torch.randn(12, 8)

    def share(items: Any) -> torch.Tensor:
        return rows[: len(items)]  # always the same memory

    made = _over(DataLoader(_Rows(), 4, collate_fn=share))
    inner = made.loop

    def loop(watch: Any) -> None:
        inner(watch)
        rows.resize_(0)
        inner(watch)

    made.loop = loop
    return made


@program("third_sampler_draws_its_batches_when_measured", "third data")
def measured(seed: int) -> Program:
    class Buckets(torch.utils.data.Sampler):
        """As samplers by length do: how many batches there are is known once they are drawn."""

        def draw(self) -> list[list[int]]:
            order = torch.randperm(12).tolist()
            return [order[i : i + 3] for i in range(0, 12, 3)]

        def __iter__(self) -> Any:
            return iter(self.draw())

        def __len__(self) -> int:
            return len(self.draw())

    return _over(DataLoader(_Rows(), batch_sampler=Buckets()))


@program("third_modes_of_the_user_around_the_drawing", "third data")
def modes_around(seed: int) -> Program:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    notes: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            notes.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            notes.append(str(func))
            return func(*args, **(kwargs or {}))

    made = _over(DataLoader(_Rows(), 2), extra=lambda: notes)
    rows = iter(DataLoader(_Rows(), 2))
    inner = made.loop

    def loop(watch: Any) -> None:
        with Functions(), Operations():
            next(rows)
        with watch.step(0), Functions(), Operations():
            next(rows)
        inner(watch)

    made.loop = loop
    return made


# autocast


def _steps_under(make: Any, model: nn.Module | None = None, **more: Any) -> Program:
    model = model or mlp()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        with make():
            value = model(x)
        return value.float().square().mean()

    return training(model, loss, **more)


@program("third_autocast_functions_inspected", "third autocast")
def inspected(seed: int) -> Program:
    notes: list[Any] = []

    def look() -> Any:
        depth = torch.autocast_increment_nesting()
        notes.append((depth, torch.autocast_decrement_nesting()))
        for function in (torch.autocast_increment_nesting, torch.autocast_decrement_nesting, torch.clear_autocast_cache):
            notes.append((function.__name__, callable(function)))
            notes.append(pickle.loads(pickle.dumps(function)).__name__)
        return torch.autocast("cpu", torch.bfloat16)

    return _steps_under(look, extra=lambda: notes)


@program("third_autocast_inside_script_export_and_compile", "third autocast")
def captured(seed: int) -> Program:
    model = mlp()
    notes: list[Any] = []

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.inner(x)

    casts = Casts()

    def loss(i: int) -> torch.Tensor:
        x = torch.ones(2, 8) * (i + 1)
        compiled = torch.compile(casts, backend="aot_eager", fullgraph=True)
        total = compiled(x).float().sum() + model(x).sum()
        exported = torch.export.export(casts, (x,), strict=False)
        notes.append([str(n.target) for n in exported.graph.nodes])
        exported = torch.export.export(casts, (x,), strict=True)
        notes.append([str(n.target) for n in exported.graph.nodes])
        scripted = torch.jit.script(casts)
        notes.append(scripted(x))
        return total

    return training(model, loss, steps=2, extra=lambda: notes)


class _Own(torch.autocast):
    entered = 0

    def __enter__(self) -> Any:
        _Own.entered += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        _Own.entered -= 100
        return super().__exit__(*error)


@program("third_autocast_subclass_entered_twice", "third autocast")
def own_autocast(seed: int) -> Program:
    _Own.entered = 0
    cast = _Own("cpu", torch.bfloat16)

    @contextlib.contextmanager
    def twice() -> Iterator[None]:
        with cast, torch.autocast("cpu", enabled=False), _Own("cpu", torch.float16):
            yield

    return _steps_under(twice, extra=lambda: (_Own.entered, torch.is_autocast_enabled("cpu")))


@program("third_autocast_left_open_in_generators", "third autocast")
def open_casts(seed: int) -> Program:
    model = mlp()
    held: list[Any] = []
    notes: list[Any] = []

    def casting() -> Iterator[int]:
        with torch.autocast("cpu", torch.bfloat16):
            yield 1
            yield 2

    def loss(i: int) -> torch.Tensor:
        held.append(casting())
        next(held[-1])
        value = model(torch.ones(2, 8) * i)
        notes.append((str(value.dtype), torch.is_autocast_enabled("cpu")))
        if i % 2:
            held.pop(0).close()
            held.pop().close()
        if i == 3:  # closed in the wrong order, autocast stays on
            torch.set_autocast_enabled("cpu", False)
            torch.set_autocast_dtype("cpu", torch.bfloat16)
        return value.float().sum()

    return training(model, loss, steps=4, extra=lambda: (notes, torch.is_autocast_enabled("cpu")))


@program("third_autocast_replaced_by_the_user", "third autocast")
def replaced_nesting(seed: int) -> Program:
    counted: list[int] = []
    original = torch.autocast_increment_nesting
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        if i == 0:
            before = torch.autocast_increment_nesting

            def counting() -> int:
                counted.append(1)
                return before()

            torch.autocast_increment_nesting = counting  # type: ignore[assignment]
        with torch.autocast("cpu", torch.bfloat16):
            value = model(torch.ones(2, 8))
        return value.float().sum()

    made = training(model, loss)

    def loop(watch: Any) -> None:
        for i in range(3):
            with watch.step(i):
                made.step(i)
        watch.close()
        with torch.autocast("cpu", torch.bfloat16):
            counted.append(10)
        torch.autocast_increment_nesting = original  # type: ignore[assignment]

    made.loop, made.extra = loop, lambda: counted
    return made


@program("third_autocast_of_refused_dtypes_warns_and_raises", "third autocast")
def refused(seed: int) -> Program:
    notes: list[Any] = []

    def odd() -> Any:
        for make in (
            lambda: torch.autocast("cpu", torch.float64),
            lambda: torch.autocast("nothing"),
            lambda: torch.autocast("cpu", dtype=3),
        ):
            try:
                with make():
                    notes.append(torch.is_autocast_enabled("cpu"))
            except Exception as error:  # noqa: BLE001
                notes.append(f"{type(error).__name__} {str(error)[:60]}")
        return torch.cpu.amp.autocast(dtype=torch.bfloat16)

    return _steps_under(odd, extra=lambda: notes)


@program("third_autocast_exit_raises_and_enter_raises", "third autocast")
def raising_casts(seed: int) -> Program:
    notes: list[Any] = []

    class Bad(torch.autocast):
        def __exit__(self, *error: Any) -> Any:
            super().__exit__(*error)
            raise OSError("exit")

    @contextlib.contextmanager
    def bad() -> Iterator[None]:
        try:
            with Bad("cpu", torch.bfloat16):
                yield
        except OSError as error:
            notes.append(str(error))

    return _steps_under(bad, extra=lambda: (notes, torch.is_autocast_enabled("cpu")))


@program("third_deprecated_cuda_amp_on_a_cpu", "third autocast")
def deprecated(seed: int) -> Program:
    model = mlp()
    scaler = torch.cuda.amp.GradScaler()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        with torch.cuda.amp.autocast():
            loss = model(torch.ones(2, 8)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Program([model], [optimizer], step, scaler=scaler)


# objects that lie about


class _LazyProxy:
    """What lazy imports and thread-local proxies are: to ask for the class loads the thing."""

    loaded = 0

    @property
    def __class__(self) -> Any:
        _LazyProxy.loaded += 1
        return dict

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise AttributeError


class _BrokenProxy:
    asked = 0

    @property
    def __class__(self) -> Any:
        _BrokenProxy.asked += 1
        raise RuntimeError("working outside of a request")


@program("third_lazy_proxies_lie_about_in_the_heap", "third heap")
def proxies(seed: int) -> Program:
    _LazyProxy.loaded = _BrokenProxy.asked = 0
    model = mlp()
    things: list[Any] = [_LazyProxy() for _ in range(50)] + [_BrokenProxy() for _ in range(50)]
    for thing in things:
        thing.__dict__["itself"] = thing
    return training(
        model,
        lambda i: model(torch.full((2, 8), float("nan") if i == 2 else 1.0)).sum(),
        steps=4,
        extra=lambda: (len(things), _LazyProxy.loaded, _BrokenProxy.asked),
    )


@program("third_dead_weak_proxies_in_lists_and_frames", "third heap")
def dead_proxies(seed: int) -> Program:
    model = mlp()
    dead = weakref.proxy(nn.Linear(2, 2))
    rows = [dead, {"x": dead}, (dead, [dead])]
    model.notes = rows  # type: ignore[assignment]
    return training(model, lambda i: model(torch.ones(2, 8)).sum(), extra=lambda: len(rows))


@program("third_collector_debugs_and_has_callbacks", "third heap")
def collector(seed: int) -> Program:
    model = mlp()
    notes: list[Any] = []
    found: list[str] = []

    def look(phase: str, info: dict[str, int]) -> None:
        found.append(phase)

    def loss(i: int) -> torch.Tensor:
        if i == 0:
            gc.callbacks.append(look)
        if i == 2:
            gc.callbacks.remove(look)
        notes.append((gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.get_freeze_count() > 0))
        return model(torch.ones(2, 8)).sum()

    return training(model, loss, extra=lambda: notes)


@program("third_finalizers_and_refcounts_of_parameters", "third heap")
def finalizers(seed: int) -> Program:
    model = mlp()
    gone: list[int] = []

    def loss(i: int) -> torch.Tensor:
        old = model[0].weight
        model[0].weight = nn.Parameter(old.detach().clone())
        weakref.finalize(model[0].weight, gone.append, i)
        return model(torch.ones(2, 8)).sum()

    optimizer = torch.optim.SGD(model[2].parameters(), 0.1)
    return training(model, loss, optimizer, steps=4, extra=lambda: gone)
