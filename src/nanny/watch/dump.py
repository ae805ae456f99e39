"""A call on disk: an operation or a module, its inputs as they were before, what came out, and where it happened. Never pickle.

torch.ops.aten.addmm_inputs.safetensors    tensors of args, kwargs and state
torch.ops.aten.addmm_inputs.json           the call: what was called, every argument, the place; enough to run it again
torch.ops.aten.addmm_outputs.safetensors   what it returned or wrote, if that was kept

`--dump-on-error`, `dump_error_data` and `nanny trace --dump` write it, `nanny replay` reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.examination import Place
from ..core.finding import NannyError
from ..core.regular_files import read_regular
from .op_facts import SAFE_NAMESPACES, workspace_of, written_by
from .tensors import map_leaves, short_dtype, tensors_in

VERSION = 2
MOST_BYTES = 1 << 30  # of one dump
MOST_RESULT = 4 * MOST_BYTES  # that is computed from one
_MOST_JSON = 16 << 20
_LEGACY = (".pkl", ".pickle", ".pt")
# what files that nobody of ours wrote, or that were changed since, make of decoding
_MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Dump:
    """What is written, and what is read back."""

    op: str = ""  # torch.ops.aten.addmm, or the class of a module: torch.nn.modules.linear.Linear
    overload: str = ""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)  # weight.NAME and buffer.NAME of a module, rng_state
    options: Mapping[str, Any] = field(default_factory=dict)  # plain attributes of a module
    outputs: tuple[Tensor, ...] = ()
    place: Place = field(default_factory=Place)
    classes: str = ""
    kind: str = ""  # mismatch, nan, inf, came_in
    dtype: str = ""  # of what a module made
    step: int = 0
    rank: int = 0
    torch_version: str = torch.__version__
    path: Path = Path()

    def fresh_inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies: the operation may write into them."""
        args, kwargs = map_leaves((self.args, self.kwargs), lambda v: v.clone() if isinstance(v, Tensor) else v)
        return args, kwargs


_PLACE = ("site", "module", "phase", "file", "line")
_PLAIN_FIELDS = ("op", "overload", "classes", "kind", "dtype", "step", "rank", "torch_version")


def save_dump(folder: Path, name: str, dump: Dump, most_bytes: int = MOST_BYTES) -> Path | None:
    """Writes the files and gives the path of the inputs; None if they would be too large. They hold training data."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    about: dict[str, Any] = {
        "version": VERSION,
        **{key: getattr(dump, key) for key in _PLAIN_FIELDS},
        "args": [_encode(v, tensors) for v in dump.args],
        "kwargs": {k: _encode(v, tensors) for k, v in dump.kwargs.items()},
        "options": {k: _encode(v, tensors) for k, v in dump.options.items()},
        "place": {key: getattr(dump.place, key) for key in _PLACE},
        "note": "tensors of a training run: treat it like the data itself",
    }
    tensors |= dump.state
    if sum(t.numel() * t.element_size() for t in (*tensors.values(), *dump.outputs)) > most_bytes:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = _free_path(folder, name)
    outputs = _outputs_of(path)
    old = os.umask(0o077)
    try:
        save_file({key: _plain(t) for key, t in tensors.items()}, str(path))
        about["sha256"] = digest(path)
        if dump.outputs:
            save_file({str(i): _plain(t) for i, t in enumerate(dump.outputs)}, str(outputs))
            about["outputs_sha256"] = digest(outputs)
        path.with_suffix(".json").write_text(json.dumps(about, indent=1, allow_nan=False), encoding="utf-8")
    finally:
        os.umask(old)
    return path


def _free_path(folder: Path, name: str) -> Path:
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)[:100]
    taken = 1
    while (path := folder / f"{safe}{f'.{taken}' if taken > 1 else ''}_inputs.safetensors").exists():
        taken += 1
    return path


def _outputs_of(path: Path) -> Path:
    return path.with_name(path.name.removesuffix("_inputs.safetensors") + "_outputs.safetensors")


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Plain JSON; what JSON has no word for is a dictionary with one tag."""
    if isinstance(value, Tensor):
        key = f"input.{len(tensors)}"
        tensors[key] = value
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
        return _with_strides(tensors[held], value, path)
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


def _with_strides(tensor: Tensor, about: dict[str, Any], path: Path) -> Tensor:
    """The tensor with the strides that it had; the file holds it without gaps."""
    tensor = tensor.to(_device(about["device"]))
    stride = tuple(int(s) for s in about["stride"])
    if tensor.stride() == stride or 0 in stride or not tensor.numel():
        return tensor
    reach = sum((length - 1) * step for length, step in zip(tensor.shape, stride)) + 1
    if len(stride) != tensor.dim() or min(stride) < 0 or reach * tensor.element_size() > MOST_BYTES:
        raise NannyError(f"{path}: strides {list(stride)[:8]} are no layout of this tensor; the file is damaged or was changed")
    return torch.empty_strided(tuple(tensor.shape), stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _is_pair(inputs: Path) -> bool:
    return inputs.is_file() and inputs.with_suffix(".json").is_file()


def find_dump(given: str | os.PathLike[str]) -> Path:
    """The inputs' safetensors file, from any of a dump's names; `X_inputs.pkl` of the old tool is a name, never unpickled."""
    path = Path(given)
    if path.is_dir():
        dumps = [dump for dump in sorted(path.glob("*_inputs.safetensors")) if _is_pair(dump)]
        if len(dumps) == 1:
            return dumps[0]
        names = ", ".join(d.name for d in dumps[:5]) or "none"
        raise NannyError(f"{given}: name one dump in this folder; it holds: {names}")
    for suffix in (*_LEGACY, ".json", ".safetensors"):
        if path.name.endswith(suffix):
            path = path.with_name(path.name.removesuffix(suffix))
            break
    name = path.name.removesuffix("_outputs").removesuffix("_inputs")
    found = path.with_name(f"{name}_inputs.safetensors")
    if _is_pair(found):
        return found
    if Path(given).is_file():
        raise NannyError(
            f"{given}: not a dump of nanny's, which is a pair *_inputs.safetensors and *_inputs.json; pickles are never loaded"
        )
    raise NannyError(f"{given}: no such dump (looked for {found} and its .json)")


def load_dump(given: str | os.PathLike[str]) -> Dump:
    from safetensors import SafetensorError

    path = find_dump(given)
    try:
        about = json.loads(_read_bounded(path.with_suffix(".json"), _MOST_JSON).decode("utf-8"))
        if about["version"] != VERSION:
            raise NannyError(f"{path}: a dump of version {about['version']!r}, this nanny reads {VERSION}; record it again")
        tensors = _load_tensors(path, about["sha256"])
        results = _load_tensors(_outputs_of(path), about["outputs_sha256"]) if "outputs_sha256" in about else {}
        place = about["place"]
        return Dump(
            **{key: type(getattr(Dump, key))(about[key]) for key in _PLAIN_FIELDS},
            args=tuple(_decode(v, tensors, path) for v in about["args"]),
            kwargs={str(k): _decode(v, tensors, path) for k, v in about["kwargs"].items()},
            options={str(k): _decode(v, tensors, path) for k, v in about["options"].items()},
            state={key: tensor for key, tensor in tensors.items() if not key.startswith("input.")},
            outputs=tuple(results[str(i)] for i in range(len(results))),
            place=Place(
                site=str(place["site"]),
                module=str(place["module"]),
                phase=str(place["phase"]),
                file=str(place["file"]),
                line=None if place["line"] is None else int(place["line"]),
            ),
            path=path,
        )
    except (*_MALFORMED, SafetensorError) as error:
        raise NannyError(f"{path}: not a readable dump ({type(error).__name__}: {error}); record it again") from None


def _load_tensors(path: Path, expected: str) -> dict[str, Tensor]:
    from safetensors.torch import load

    data = _read_bounded(path, MOST_BYTES + _MOST_JSON)
    if hashlib.sha256(data).hexdigest() != expected:
        raise NannyError(f"{path}: differs from what was written (sha256); it is damaged or was changed")
    return load(data)


def _read_bounded(path: Path, most: int) -> bytes:
    try:
        return read_regular(path, most)
    except OSError:
        raise NannyError(f"{path}: a dump is a regular file of at most {most >> 20} MB") from None


def operation_of(dump: Dump) -> Any:
    """The operation that a dump names, found in namespaces that only compute; None if it is in another."""
    head, _, rest = dump.op.removeprefix("torch.ops.").partition(".")
    if head not in SAFE_NAMESPACES:
        return None
    packet = getattr(getattr(torch.ops, head), rest, None)
    overload = getattr(packet, dump.overload or "default", None) if isinstance(packet, torch._ops.OpOverloadPacket) else None
    if not isinstance(overload, torch._ops.OpOverload):
        raise NannyError(
            f"{dump.path}: this torch ({torch.__version__}) has no {dump.op}.{dump.overload or 'default'}; "
            f"recorded with {dump.torch_version}"
        )
    return overload


def refuse_impure(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], path: Path) -> None:
    """NannyError unless an operation only computes tensors from tensors, of a size that is known before it runs."""
    schema = func._schema
    reads = [str(argument.type) for argument in schema.arguments if not argument.is_out]
    makes = schema.returns or written_by(func, args, kwargs)
    computes = func.namespace == "aten" and makes and not _MORE_THAN_VALUES & set(func.tags)
    plain = not any(word in kind for kind in reads for word in _NO_VALUES) and not workspace_of(func, args, kwargs)
    if not computes or not plain or not any(kind in ("Tensor", "List[Tensor]") for kind in reads):
        raise NannyError(f"{path}: {func} does more than compute tensors from tensors, so it is not run from a file")
    size = _size_of_results(func, args, kwargs)
    if size is None or size > MOST_RESULT:
        what = "cannot be known before it runs" if size is None else f"would take {size / 2**30:.3g} GB"
        raise NannyError(f"{path}: the result of {func} {what}; at most {MOST_RESULT >> 30} GB are computed from a file")


_MORE_THAN_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view}
_NO_VALUES = ("Stream", "Storage", "Generator", "Future", "Dict", "Any", "__torch__", "QScheme")
_META = torch.device("meta")


def on_meta(value: Any) -> Any:
    """Tensors and devices without memory."""
    if isinstance(value, torch.device):
        return _META
    return (
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META) if isinstance(value, Tensor) else value
    )


def _size_of_results(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    devices = {t.device.type for t in tensors_in((args, kwargs))} | {"cpu"}
    if any(isinstance(value, torch.device) and value.type not in devices for value in (*args, *kwargs.values())):
        return None  # computing does not bring a device into play
    try:
        with torch.no_grad():
            meta_args, meta_kwargs = map_leaves((tuple(args), dict(kwargs)), on_meta)
            out = func(*meta_args, **meta_kwargs)
    except Exception:  # noqa: BLE001  whatever a kernel without memory raises on hostile arguments
        return None
    return sum(t.numel() * t.element_size() for t in tensors_in(out))
