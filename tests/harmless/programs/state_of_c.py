"""A forward that moves on what only code in C can see, on steps that go wrong and are made again."""

from __future__ import annotations

import collections
import decimal
import io
import itertools
import multiprocessing
import random
import re
import sqlite3
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ..program import NAN, Program, batch, mlp, program

BAD = (2, 4)


def careful(model: nn.Module, loss: Callable[[int], torch.Tensor], extra: Callable[[], Any]) -> Program:
    """A step with a bad loss is not taken."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = loss(i)
        value.backward()
        if value.isfinite():
            optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=7, extra=extra)


class _Moving(nn.Module):
    """Asks `advance` for one number at every call of its forward, in the middle of two layers."""

    def __init__(self, advance: Callable[[], float]) -> None:
        super().__init__()
        self.first, self.last, self.advance = nn.Linear(8, 8), nn.Linear(8, 4), advance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)) * (1 + self.advance() % 7 / 100))  # type: ignore[no-any-return]


def _moved_by(name: str) -> Callable[[Callable[[], tuple[Callable[[], float], Callable[[], Any]]]], None]:
    """A program whose forward advances what `build` gives, and what is left of it at the end."""

    def register(build: Callable[[], tuple[Callable[[], float], Callable[[], Any]]]) -> None:
        @program(f"forward_moves_on_{name}", "state of C")
        def moving(seed: int) -> Program:
            advance, left = build()
            model = _Moving(advance)

            def loss(i: int) -> torch.Tensor:
                return model(batch(i) * (NAN if i in BAD else 1)).square().mean()  # type: ignore[no-any-return]

            return careful(model, loss, left)

    return register


@_moved_by("a_count_and_a_cycle")
def _counts() -> Any:
    count, cycle, pairs = itertools.count(3), itertools.cycle([1, 5, 2]), itertools.pairwise(range(100))
    return lambda: next(count) + next(cycle) + next(pairs)[0], lambda: [next(count), next(cycle), next(pairs)]


@_moved_by("iterators_of_lists_and_dictionaries")
def _iterators() -> Any:
    rows, names, backwards = iter(list(range(50))), iter(dict.fromkeys(range(50))), reversed(range(50))
    zipped = zip(rows, names, backwards)
    return lambda: float(sum(next(zipped))), lambda: next(zipped)


@_moved_by("a_generator_that_was_given_out")
def _generators() -> Any:
    def walk() -> Iterator[float]:
        value = 1.0
        while True:
            value = value * 1.7 % 5
            yield value

    walking = walk()
    return lambda: next(walking), lambda: next(walking)


@_moved_by("random_sources_of_numpy_and_python")
def _sources() -> Any:
    new, old, own = np.random.default_rng(5), np.random.RandomState(6), random.Random(7)
    return lambda: float(new.random() + old.rand() + own.random()), lambda: [new.random(), old.rand(), own.random()]


@_moved_by("a_stream_that_is_packed")
def _packed() -> Any:
    packer, unpacker = zlib.compressobj(), zlib.decompressobj()
    sums = [0]

    def advance() -> float:
        data = packer.compress(struct.pack("<q", sums[0])) + packer.flush(zlib.Z_SYNC_FLUSH)
        sums[0] = zlib.crc32(unpacker.decompress(data), sums[0])
        return float(sums[0] % 11)

    return advance, lambda: [sums, packer.flush().hex()]


@_moved_by("rows_of_a_database")
def _rows() -> Any:
    database = sqlite3.connect(":memory:")
    database.execute("create table drawn (n integer primary key, value real)")

    def advance() -> float:
        cursor = database.execute("insert into drawn (value) values (?)", (1.5,))
        return float(cursor.lastrowid or 0)

    return advance, lambda: database.execute("select * from drawn").fetchall()


@_moved_by("positions_in_files")
def _files() -> Any:
    memory, disk = io.BytesIO(bytes(range(200))), tempfile.TemporaryFile()  # noqa: SIM115
    disk.write(bytes(range(200)))
    disk.seek(0)

    def left() -> Any:
        places = [memory.tell(), disk.tell()]
        disk.close()
        return places

    return lambda: float(memory.read(1)[0] + disk.read(2)[1]), left


@_moved_by("numbers_shared_by_processes")
def _shared() -> Any:
    number, row = multiprocessing.Value("d", 1.0), multiprocessing.RawArray("i", 4)

    def advance() -> float:
        with number.get_lock():
            number.value += 1.25
        row[int(number.value) % 4] += 3
        return float(number.value + sum(row))

    return advance, lambda: [number.value, list(row)]


@_moved_by("queues_views_and_matches")
def _queues() -> Any:
    turning = collections.deque(range(9), maxlen=9)
    view = memoryview(bytearray(64)).cast("i")
    matches = re.finditer("a+", "a" * 3 + "b" + "aa" + "b".join("a" * 40))
    context = decimal.Context(prec=5)

    def advance() -> float:
        turning.append(turning.popleft() + 1)
        turning.rotate(2)
        view[turning[0] % 16] += 1
        context.divide(decimal.Decimal(1), decimal.Decimal(turning[0] + 3))
        return float(turning[0] + sum(view) + len(next(matches).group()))

    return advance, lambda: [list(turning), list(view), next(matches).span(), sorted(map(str, context.flags.items()))]


@program("forward_reads_its_batch_from_an_open_file", "state of C")
def reads(seed: int) -> Program:
    """The input of the model is a file; a bad row of it makes the step bad, and reading it again gives the next row."""

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, source: io.BufferedReader) -> torch.Tensor:
            return self.inner(torch.frombuffer(bytearray(source.read(32)), dtype=torch.float32)[None])  # type: ignore[no-any-return]

    model = Reading()
    rows = torch.randn(9, 8)
    rows[3, 2], rows[5, 1] = NAN, float("inf")
    with open("rows.bin", "wb") as file:
        file.write(rows.numpy().tobytes())
    source = open("rows.bin", "rb")  # noqa: SIM115

    def left() -> Any:
        place = source.tell()
        source.close()
        return place

    return careful(model, lambda i: model(source).square().mean(), left)
