"""Loaders, samplers and batches that are strange."""

from __future__ import annotations

import gc
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

from ..program import NAN, Program, batch, mlp, program, training


@program("loader_of_a_thread_and_endless_rows", "data")
def endless_rows(seed: int) -> Program:
    class Endless(IterableDataset):  # type: ignore[type-arg]
        asked = 0

        def __iter__(self) -> Any:
            while True:
                self.asked += 1
                yield torch.rand(8)

        def __len__(self) -> int:
            raise TypeError("endless")

    rows = Endless()
    loader = DataLoader(rows, batch_size=4)
    model = mlp()
    stream = iter(loader)
    return training(model, lambda i: model(next(stream)).square().mean(), steps=5, extra=lambda: rows.asked)


@program("batch_objects_that_count_looks", "data")
def counted_looks(seed: int) -> Program:
    looks: list[str] = []

    class Batch:
        def __init__(self, x: torch.Tensor) -> None:
            object.__setattr__(self, "hidden", x)

        def __getattribute__(self, name: str) -> Any:
            if name not in ("__class__",):
                looks.append(name)
            return object.__getattribute__(self, name)

        def __iter__(self) -> Any:
            looks.append("iter")
            raise RuntimeError("do not iterate")

        def __len__(self) -> int:
            looks.append("len")
            raise RuntimeError("do not count")

        def __eq__(self, other: Any) -> Any:
            looks.append("eq")
            raise RuntimeError("do not compare")

        def __hash__(self) -> int:
            looks.append("hash")
            raise RuntimeError("do not hash")

        def __bool__(self) -> bool:
            looks.append("bool")
            raise RuntimeError("neither")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, given: Any) -> Any:
            return Batch(self.inner(given.hidden))

    model = Net()

    def loss(i: int) -> torch.Tensor:
        return model(Batch(batch(i) * (NAN if i == 2 else 1))).hidden.square().mean()

    return training(model, loss, steps=5, extra=lambda: looks)


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
        for i, given in enumerate(loader):
            with watch.step(i):
                optimizer.zero_grad()
                loss = model(given).square().mean()
                loss.backward()
                optimizer.step()
            made.see(loss)
            if i == 3:
                break

    made.loop = loop
    return made


@program("loader_iterator_used_beyond_close", "data")
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


@program("loader_next_replaced_inside_and_put_back", "data")
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


@program("loader_worker_error_with_its_traceback", "data")
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

    # an error that holds the frame that raised it, and the loader in there, goes when garbage is next looked for
    return training(model, loss, steps=2, extra=lambda: gc.collect() and notes)


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


@program("loader_batches_of_odd_kinds", "data")
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
        for i, given in enumerate(DataLoader(kinds, batch_size=None, collate_fn=lambda x: x)):  # type: ignore[arg-type]
            with watch.step(i):
                optimizer.zero_grad()
                model(rows + i).sum().backward()
                optimizer.step()
            if isinstance(given, (Iterator, type(iter([])))):
                made.see(list(given))

    made.loop = loop
    return made


@program("loader_iterator_class_of_the_user", "data")
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


@program("loader_persistent_workers_and_infinite_stream", "data")
def persistent(seed: int) -> Program:
    loader = DataLoader(_Stream(), 2, num_workers=1, persistent_workers=True, prefetch_factor=2)
    return _over(loader)


@program("loader_batches_die_when_dropped", "data")
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


@program("loader_pinned_and_out_of_order", "data")
def pinned(seed: int) -> Program:
    return _over(DataLoader(_Rows(), 3, pin_memory=True, num_workers=1, in_order=False, timeout=60))


@program("loader_prefetched_by_a_thread", "data")
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


@program("loader_inside_forward_and_nested", "data")
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


@program("batch_changed_in_place_after_it_came", "data")
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


@program("sampler_draws_its_batches_when_measured", "data")
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


@program("modes_of_the_user_around_the_drawing", "data")
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
