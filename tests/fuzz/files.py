"""One whole file of every kind that a command reads, and ways to spoil each: bytes, text, structure, kind of file."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import re
import socket
import sqlite3
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from ops.op_models import WrongKernel
from runs.query_recordings import HEALTHY, SICK, record
from safetensors.torch import save_file

from nanny import CompareWithCPU, NannyError

SOURCE = """import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 2)

    def forward(self, x):
        return torch.log(self.lin(x).half().float().exp() + 1e-12)

def build_model():
    return Net()

def loss(output):
    return output.sum()

def train(data):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-8)
    scaler = torch.amp.GradScaler("cuda")
    for x in data:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            value = model(x).sum()
        scaler.scale(value).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""
NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "source": ["# title"]},
        {"cell_type": "code", "source": SOURCE.splitlines(keepends=True), "outputs": []},
        {"cell_type": "code", "source": "%matplotlib inline\nx = model(x).half()\n"},
    ],
    "metadata": {"kernelspec": {"language": "python"}},
    "nbformat": 4,
}
DEEPSPEED = {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 32}, "optimizer": {"type": "Adam", "params": {}}}
PYPROJECT = """[tool.nanny]
select = ["SCALER", "NUM"]
exclude = ["third_party"]
device = "cuda"
amp-dtype = "fp16"
[tool.nanny.per-file-ignores]
"tests/*" = ["NUM"]
"""
ODD_TEXT = (
    *(
        "\x1b[31mred\x1b[0m",
        "\x1b]0;title\x07",
        "\u202egnp.exe",
        "a\u200bb\u2066c\u2069",
        "\x00",
        "a\x00b",
        "\ud800",
        "\udce9x",
        "\x9b2J",
    ),
    *(
        "",
        " ",
        "\n",
        "line\nline",
        "\r",
        "\t",
        "\ufeff",
        "\u2028",
        "\U000e0001",
        "a" * 300,
        "b" * 100_000,
        "é" * 200,
        "漢字" * 60,
    ),
    *(
        "..",
        ".",
        "~",
        "-",
        "--",
        "-1",
        "0",
        "nan",
        "inf",
        "-inf",
        "1e999",
        "NaN",
        "1e-400",
        "0x10",
        "1_000",
        "٣",
        "²",
        "1.5",
        "-0.0",
    ),
    *(
        "99999999999999999999",
        "-99999999999999999999",
        "9" * 5000,
        "true",
        "null",
        "{}",
        "[]",
        "%s%n{0}",
        "$(touch pwned)",
        "65536",
    ),
    *(
        "'; DROP TABLE run; --",
        "*",
        "[",
        "[!",
        "**/**",
        "a:b:c",
        ":",
        ":0",
        "x:1",
        "1:2:3",
        "=",
        "@x",
        "%",
        "\\",
        "\\x1b",
        "'",
        '"',
        "`",
    ),
    *(
        "<script>",
        "metrics.db:1",
        "/dev/null",
        "/dev/zero",
        "/proc/self/mem",
        "file:///etc/passwd",
        "http://x",
        "weights.pt:\x1b[2J",
    ),
)
ODD_NUMBERS = (
    *(0, -1, 1, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**40),
    *(1.5, -0.0, 1e308, -1e-320, float("nan"), float("inf"), -float("inf")),
)
ODD_DTYPES = (
    *(
        "'<f4'",
        "'>f8'",
        "'|O'",
        "'<U3'",
        "'<M8[s]'",
        "'V7'",
        "[('a', '<f4')]",
        "'<c8'",
        "'|b1'",
        "'<f16'",
        "'\x1b[31m'",
        "'<i8'",
        "'?'",
    ),
    *("''", "None", "3", "'<f4', 'x': 1", "[('a', [('b', '<f4', (3,))])]"),
)
ODD_SHAPES = (
    *(
        "(8, 4)",
        "()",
        "(-1,)",
        "(0,)",
        "(2**40,)",
        "(1099511627776,)",
        "(4294967296, 4294967296)",
        "(3, 'x')",
        "8",
        "(8.0,)",
        "[8, 4]",
    ),
    *("(1,) * 99", "(" + "1," * 70 + ")", "(True,)", "(9" + "9" * 30 + ",)", "(1, 0, 999999999999)"),
)


def odd_value(rng: Random) -> Any:
    """Something that JSON can carry and nobody expects."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(ODD_NUMBERS)
    if kind == 1:
        return rng.choice((None, True, False, [], {}, [[]], {"": None}))
    if kind == 2:
        return [odd_value(rng) for _ in range(rng.randrange(4))]
    if kind == 3:
        return {rng.choice(ODD_TEXT): odd_value(rng) for _ in range(rng.randrange(3))}
    return rng.choice(ODD_TEXT)


def make_whole_files(folder: Path) -> None:
    """Everything a command may be given, as nanny or its user wrote it."""
    (folder / "train.py").write_text(SOURCE)
    (folder / "notes.ipynb").write_text(json.dumps(NOTEBOOK))
    (folder / "ds_config.json").write_text(json.dumps(DEEPSPEED))
    (folder / "accelerate.yaml").write_text(
        "mixed_precision: fp16\ndistributed_type: MULTI_GPU\ncompute_environment: LOCAL_MACHINE\n"
    )
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "notes.txt").write_text("hello\n")
    (folder / "table.csv").write_text("step,loss\n1,2.5\n")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, generator=generator)
    torch.save(x, folder / "sample.pt")
    torch.save({"lin.weight": x[:2], "lin.bias": x[0, :2], "state": [{"step": 3}]}, folder / "weights.pt")
    save_file({"lin.weight": x[:2].clone(), "b": x.bfloat16()}, folder / "weights.safetensors")
    np.save(folder / "array.npy", x.numpy())
    np.savez(folder / "arrays.npz", a=x.numpy())
    short = {"steps": 12, "trace_every": 5, "started": 1.7e9}
    record(folder / "nanny_logs", replace(HEALTHY, **short))
    record(
        folder / "nanny_logs", replace(SICK, **{**short, "started": 1.8e9}, nan_output=(10, "head.softmax"), loss_is_nan_from=10)
    )
    tool = CompareWithCPU(dump_error_data=True, output_dir=folder / "ops")
    with (
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(NannyError),
        WrongKernel("addmm", lambda t: t.mul_(2)),
        tool,
    ):
        torch.addmm(x[0, :2], x, x[:2].T)  # the first fault ends the program
    (folder / "baseline.json").write_text(
        json.dumps({"version": 1, "findings": [{"file": "train.py", "code": "SCALER_CLIP", "text": "x", "count": 1}]})
    )


def all_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# Ways to spoil a file. Each takes its bytes and gives others.


def spoil_bytes(data: bytes, rng: Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 40))):
        at = rng.randrange(len(out) + 1)
        size = rng.choice((1, 1, 4, 16, 200))
        kind = rng.randrange(7)
        if kind == 0 and out:
            out[min(at, len(out) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del out[at : at + size]
        elif kind == 2:
            out[at:at] = rng.randbytes(size)
        elif kind == 3:
            out[at:at] = out[at : at + size] * rng.choice((2, 50))
        elif kind == 4:
            out[at : at + size] = rng.choice((b"\x00", b"\xff", b"\x80")) * size
        elif kind == 5:
            out = out[:at]
        else:
            out[at:at] = rng.choice(ODD_TEXT[:12]).encode("utf-8", "surrogatepass")
    return bytes(out)


def spoil_text(data: bytes, rng: Random) -> bytes:
    """A word, a number or a line replaced, doubled or nested deeply."""
    text = data.decode("utf-8", "replace")
    spots = list(re.finditer(r"\d+(?:\.\d+)?|\w+|[^\w\s]", text))
    if not spots:
        return rng.choice(ODD_TEXT).encode("utf-8", "surrogatepass")
    for _ in range(rng.choice((1, 1, 3))):
        spot = rng.choice(spots)
        depth = rng.choice((50, 400, 3000, 100_000))
        new = rng.choice(
            (
                rng.choice(ODD_TEXT),
                repr(odd_value(rng)),
                json.dumps(odd_value(rng)),
                "(" * depth + "1" + ")" * depth,
                "[" * depth,
                "-" * depth + "1",
                "x" + ".y" * depth,
                "f(" * depth + "x" + ")" * depth,
                "if x:\n" + " " * rng.choice((1, 8)) + "pass",
                "1" + "+1" * depth,
                "{" * depth,
                "9" * depth,
                "lambda: " * (depth % 500),
            )
        )
        text = text[: spot.start()] + new + text[spot.end() :]
        spots = spots[: max(len(spots) // 2, 1)]
    return text.encode("utf-8", "surrogatepass")


def spoil_json(data: bytes, rng: Random) -> bytes:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return spoil_bytes(data, rng)
    for _ in range(rng.choice((1, 1, 2))):
        value = _spoil_node(value, rng)
    return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def _spoil_node(value: Any, rng: Random) -> Any:
    holder = isinstance(value, (dict, list)) and len(value) > 0
    if not holder or rng.random() < 0.15:
        return odd_value(rng)
    copy = value.copy()
    key = rng.choice(list(copy)) if isinstance(copy, dict) else rng.randrange(len(copy))
    kind = rng.random()
    if kind < 0.15:
        del copy[key]
    elif kind < 0.3 and isinstance(copy, dict):
        copy[rng.choice(ODD_TEXT)] = copy.pop(key)
    else:
        copy[key] = _spoil_node(copy[key], rng)
    return copy


def spoil_store(data: bytes, rng: Random) -> bytes:
    """One value of one row, a table less, or another version: what a hand or another program would do to it."""
    with sqlite3.connect(":memory:") as db:
        db.deserialize(data[:18] + b"\x01\x01" + data[20:])  # not WAL, which memory has not
        tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE TABLE%'")]
        db.execute("PRAGMA ignore_check_constraints = ON")
        for _ in range(rng.choice((1, 1, 3))):
            table = rng.choice(tables)
            columns = [row[1] for row in db.execute(f'PRAGMA table_info("{table}")')]
            kind = rng.random()
            try:
                if kind < 0.05:
                    db.execute(f'DELETE FROM "{table}"')
                elif kind < 0.08:
                    db.execute(f'ALTER TABLE "{table}" RENAME COLUMN "{rng.choice(columns)}" TO other')
                elif kind < 0.1:
                    db.execute(f'DROP TABLE "{table}"')
                else:
                    _spoil_cells(db, table, columns, rng)
            except (sqlite3.Error, OverflowError, IndexError):  # the table is gone already
                continue
        db.commit()
        return bytes(db.serialize())


def _spoil_cells(db: sqlite3.Connection, table: str, columns: list[str], rng: Random) -> None:
    column = rng.choice(columns)
    old = db.execute(f'SELECT "{column}" FROM "{table}" LIMIT 1').fetchone()
    value: Any = rng.choice((*ODD_TEXT, *ODD_NUMBERS, None, b"", b"\xff" * 40, rng.randbytes(200)))
    if old is not None and isinstance(old[0], str) and old[0][:1] in "{[" and rng.random() < 0.7:
        value = spoil_json(old[0].encode(), rng).decode("utf-8", "replace")
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if old is not None and isinstance(old[0], bytes) and rng.random() < 0.5:
        value = spoil_bytes(old[0], rng)
    some = rng.choice(("1", "random() % 2", f'rowid = (SELECT max(rowid) FROM "{table}")'))
    db.execute(f'UPDATE OR IGNORE "{table}" SET "{column}" = ? WHERE {some}', (value,))


def spoil_npy(data: bytes, rng: Random) -> bytes:
    descr, shape = rng.choice(ODD_DTYPES), rng.choice(ODD_SHAPES)
    order = rng.choice(("False", "True", "None", "'x'"))
    head = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    if rng.random() < 0.2:
        head = spoil_bytes(head, rng)
    head += b" " * rng.choice((0, 10, 70_000)) + b"\n"
    version = rng.choice((b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00"))
    size = struct.pack("<H", len(head) & 0xFFFF) if version == b"\x01\x00" else struct.pack("<I", rng.choice((len(head), 2**31)))
    return b"\x93NUMPY" + version + size + head + data[128:]


def spoil_safetensors(data: bytes, rng: Random) -> bytes:
    size = int.from_bytes(data[:8], "little")
    try:
        head = spoil_json(data[8 : 8 + size], rng)
    except (ValueError, OverflowError):
        return spoil_bytes(data, rng)
    length = rng.choice((len(head), len(head), len(head), len(head) + 1, 2**63, 2**64 - 1, 0, 10**8))
    return length.to_bytes(8, "little") + head + data[8 + size :]


def spoil_torch(data: bytes, rng: Random) -> bytes:
    """The pickle inside the archive spoilt, the archive itself whole; or odd contents saved by torch."""
    if rng.random() < 0.4:
        return odd_checkpoint(rng)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as old:
            parts = {item.filename: old.read(item) for item in old.infolist()}
    except (zipfile.BadZipFile, OSError):
        return spoil_bytes(data, rng)
    name = rng.choice(sorted(parts))
    if rng.random() < 0.7:
        name = next((n for n in parts if n.endswith("data.pkl")), name)
    parts[name] = spoil_bytes(parts[name], rng)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as new:
        for filename, content in parts.items():
            new.writestr(filename, content)
    return out.getvalue()


def odd_checkpoint(rng: Random) -> bytes:
    x = torch.ones(3, 4)
    deep: Any = x
    for _ in range(rng.choice((3, 150))):
        deep = [deep]
    loop: list[Any] = [x]
    loop.append(loop)
    makers: tuple[Callable[[], Any], ...] = (
        lambda: {rng.choice(ODD_TEXT): x, rng.choice(ODD_TEXT): x * 70_000},
        lambda: {rng.choice(ODD_NUMBERS): x, None: x, (1, 2): x},
        lambda: deep,
        lambda: loop,
        lambda: x.to_sparse(),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.empty(2**20, 0),
        lambda: x[:1].expand(2**40, 4),
        lambda: torch.ones(1).expand(2**31, 2**31),
        lambda: torch.ones([1] * 40),
        lambda: x.to(torch.complex64),
        lambda: {"input": x, "target": x},
        lambda: [{"input": x}, 3],
        lambda: (x, x, "x"),
        lambda: {"state_dict": [x]},
        lambda: {"state_dict": {"\x1b[31m": x}},
        lambda: torch.full((3, 3), float("nan")),
        lambda: torch.zeros(2, 3),
        lambda: torch.tensor(1.0),
        lambda: torch.full((2, 2), 1e-45),
        lambda: torch.tensor([3.4e38, -3.4e38, 1e-38]),
        lambda: torch.arange(5),
        lambda: x.double() * 1e300,
        lambda: rng.choice((None, 3, "text", [], {}, set(), 1.5, True)),
    )
    out = io.BytesIO()
    torch.save(rng.choice(makers)(), out)
    return out.getvalue()


SPOIL: dict[str, Callable[[bytes, Random], bytes]] = {
    ".py": spoil_text,
    ".ipynb": spoil_json,
    ".json": spoil_json,
    ".yaml": spoil_text,
    ".toml": spoil_text,
    ".txt": spoil_text,
    ".csv": spoil_text,
    ".npy": spoil_npy,
    ".npz": spoil_bytes,
    ".pt": spoil_torch,
    ".safetensors": spoil_safetensors,
    ".db": spoil_store if importlib.util.find_spec("nanny.store.damage") else spoil_bytes,  # checksums tell a changed cell
}


def spoil_file(path: Path, rng: Random) -> str:
    """Spoils the file in its own way, as bytes, or puts something else in its place; says which."""
    kind = rng.random()
    if kind < 0.08:
        return _replace(path, rng)
    data = path.read_bytes()
    how = SPOIL[path.suffix] if kind < 0.7 else rng.choice((spoil_bytes, spoil_bytes, spoil_text))
    path.write_bytes(how(data, rng))
    if "_inputs" in path.name:
        _sign_again(path, rng)
    return how.__name__


def _sign_again(path: Path, rng: Random) -> None:
    """A dump whose checksum was made to fit what was changed in it."""
    if path.suffix == ".safetensors" and rng.random() < 0.8:
        about = json.loads(path.with_suffix(".json").read_text())
        about["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        path.with_suffix(".json").write_text(json.dumps(about))


def _replace(path: Path, rng: Random) -> str:
    path.unlink()
    kind = rng.choice(("fifo", "folder", "loop", "dangling", "socket", "zero", "empty", "nothing", "terminal"))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "dangling":
        path.symlink_to(path.parent / "nowhere")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as unix:
            try:
                unix.bind(str(path))
            except OSError:  # the path is too long for a socket
                path.mkdir()
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "terminal":
        path.symlink_to("/dev/null")
    elif kind == "empty":
        path.write_bytes(b"")
    return kind
