"""One operation on disk: its inputs as they were before it ran, its outputs, and where it happened. Never pickle.

torch.ops.aten.addmm_inputs.safetensors    tensors of args and kwargs
torch.ops.aten.addmm_inputs.json           the call: which operation, every argument, the place; enough to run it again
torch.ops.aten.addmm_outputs.safetensors   what it returned or wrote
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.examination import Place
from ..core.finding import NannyError
from ..watch.op_facts import SAFE_NAMESPACES, long_name
from ..watch.tensors import map_leaves, short_dtype
from .records import OpFault
from .reference import Call

VERSION = 1
MOST_BYTES = 1 << 30  # of one dump
MOST_DUMPS = 20  # of one run
_LEGACY = (".pkl", ".pickle", ".pt")


def save_call(folder: Path, call: Call, results: list[Tensor], fault: OpFault) -> Path | None:
    """Writes the three files and gives the path of the inputs; None if they would be too large. They hold training data."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    args, kwargs = call.inputs
    about: dict[str, Any] = {
        "version": VERSION,
        "op": str(call.func),
        "namespace": call.func.namespace,
        "name": call.func._schema.name.partition("::")[2],
        "overload": call.func._overloadname,
        "args": [_encode(v, tensors) for v in args],
        "kwargs": {k: _encode(v, tensors) for k, v in kwargs.items()},
        "place": {
            "site": fault.place.site,
            "module": fault.place.module,
            "phase": fault.place.phase,
            "file": fault.place.file,
            "line": fault.place.line,
        },
        "classes": fault.classes,
        "kind": fault.kind,
        "step": fault.step,
        "rank": fault.rank,
        "torch": torch.__version__,
        "note": "inputs and outputs of a training run: treat it like the data itself",
    }
    if sum(t.numel() * t.element_size() for t in (*tensors.values(), *results)) > MOST_BYTES:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    base = _free_base(folder, long_name(call.func) + (f".rank{fault.rank}" if fault.rank else ""))
    path = folder / f"{base}_inputs.safetensors"
    outputs = folder / f"{base}_outputs.safetensors"
    old = os.umask(0o077)
    try:
        save_file(tensors, str(path))
        save_file({str(i): _plain(t) for i, t in enumerate(results)}, str(outputs))
        about |= {"sha256": _digest(path), "outputs_sha256": _digest(outputs)}
        path.with_suffix(".json").write_text(json.dumps(about, indent=1, allow_nan=False), encoding="utf-8")
    finally:
        os.umask(old)
    return path


def _free_base(folder: Path, name: str) -> str:
    taken = 1
    while (folder / f"{name}{f'.{taken}' if taken > 1 else ''}_inputs.safetensors").exists():
        taken += 1
    return name + (f".{taken}" if taken > 1 else "")


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Plain JSON; what JSON has no word for is a dictionary with one tag."""
    if isinstance(value, Tensor):
        key = str(len(tensors))
        tensors[key] = _plain(value)
        layout = {"shape": list(value.shape), "stride": list(value.stride()), "dtype": short_dtype(value.dtype)}
        return {"tensor": key, **layout, "device": str(value.device)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"float": value.hex() if value == value and abs(value) != float("inf") else str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [_encode(v, tensors) for v in value]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return {"torch": str(value).removeprefix("torch.")}
    return {"left_out": type(value).__name__}  # a generator


def _decode(value: Any, tensors: dict[str, Tensor], path: Path) -> Any:
    if not isinstance(value, dict):
        return value
    tag = next(iter(value))
    held = value[tag]
    if tag == "tensor":
        return _restored(tensors[held], value)
    if tag == "float":
        return float(held) if held in ("nan", "inf", "-inf") else float.fromhex(held)
    if tag == "complex":
        return complex(*(float.fromhex(part) for part in held))
    if tag in ("list", "tuple"):
        items = [_decode(v, tensors, path) for v in held]
        return items if tag == "list" else tuple(items)
    if tag == "device":
        return _device(held)
    if tag == "torch":
        named = getattr(torch, held, None)
        if not isinstance(named, (torch.dtype, torch.memory_format, torch.layout)):
            raise NannyError(f"{path}: {held!r} is no type of torch; the file is damaged")
        return named
    raise NannyError(f"{path}: the argument was of type {held!r}, which a dump cannot hold; it cannot be run again")


def _device(name: str) -> torch.device:
    """The device of then if this machine has it, else the CPU."""
    device = torch.device(name)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        return torch.device("cpu")
    return device


def _restored(tensor: Tensor, about: dict[str, Any]) -> Tensor:
    tensor = tensor.to(_device(about["device"]))
    stride = tuple(about["stride"])
    if tensor.stride() == stride or 0 in stride:
        return tensor
    return torch.empty_strided(tuple(about["shape"]), stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@dataclass(frozen=True)
class Stored:
    """A dump, read back."""

    path: Path
    func: Any  # OpOverload; None if its namespace is not one that may be resolved by name
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]
    place: Place
    classes: str
    kind: str
    step: int
    torch_version: str

    def fresh_inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies: the operation may write into them."""
        args, kwargs = map_leaves((self.args, self.kwargs), lambda v: v.clone() if isinstance(v, Tensor) else v)
        return args, kwargs


def find_dump(given: str | os.PathLike[str]) -> Path:
    """The inputs' safetensors file, from any of a dump's names; `X_inputs.pkl` of the old tool is a name, never unpickled."""
    path = Path(given)
    for suffix in (*_LEGACY, ".json", ".safetensors"):
        if path.name.endswith(suffix):
            path = path.with_name(path.name.removesuffix(suffix))
            break
    name = path.name.removesuffix("_outputs").removesuffix("_inputs")
    found = path.with_name(f"{name}_inputs.safetensors")
    if found.is_file() and found.with_suffix(".json").is_file():
        return found
    if Path(given).is_dir():
        dumps = sorted(Path(given).glob("*_inputs.safetensors"))
        if len(dumps) == 1:
            return dumps[0]
        names = ", ".join(d.name for d in dumps[:5]) or "none"
        raise NannyError(f"{given}: name one dump in this folder; it holds: {names}")
    if Path(given).is_file():
        raise NannyError(
            f"{given}: not a dump of nanny's, which is a pair *_inputs.safetensors and *_inputs.json; pickles are never loaded"
        )
    raise NannyError(f"{given}: no such dump (looked for {found} and its .json)")


def load_call(given: str | os.PathLike[str]) -> Stored:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = find_dump(given)
    try:
        about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        if about["version"] != VERSION:
            raise NannyError(f"{path}: a dump of version {about['version']}, this nanny reads {VERSION}; record it again")
        if about["sha256"] != _digest(path):
            raise NannyError(f"{path}: differs from what was written (sha256); it is damaged or was changed")
        tensors = load_file(str(path))
        outputs = path.with_name(path.name.replace("_inputs.", "_outputs."))
        results = load_file(str(outputs)) if outputs.is_file() else {}
        return Stored(
            path=path,
            func=_resolved(about, path),
            op=f"torch.ops.{about['namespace']}.{about['name']}",
            args=tuple(_decode(v, tensors, path) for v in about["args"]),
            kwargs={k: _decode(v, tensors, path) for k, v in about["kwargs"].items()},
            outputs=tuple(results[str(i)] for i in range(len(results))),
            place=Place(**about["place"]),
            classes=about["classes"],
            kind=about["kind"],
            step=about["step"],
            torch_version=about["torch"],
        )
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError, SafetensorError) as error:
        raise NannyError(f"{path}: not a readable dump ({type(error).__name__}: {error}); record it again") from None


def _resolved(about: dict[str, Any], path: Path) -> Any:
    """By name, in namespaces that only compute: a dump cannot make nanny call anything else."""
    if about["namespace"] not in SAFE_NAMESPACES:
        return None
    packet = getattr(getattr(torch.ops, about["namespace"]), about["name"], None)
    overload = getattr(packet, about["overload"] or "default", None)
    if overload is None:
        raise NannyError(f"{path}: this torch ({torch.__version__}) has no {about['op']}; recorded with {about['torch']}")
    return overload
