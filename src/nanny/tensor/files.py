"""Loads one tensor from a `.pt`, `.safetensors` or `.npy` file without ever running code from it.

`load_tensor("grads.pt:layer1.weight")`: what stands behind the colon is the key in a file that holds several tensors; nested
dictionaries and lists are joined with dots.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.finding import NannyError
from ..core.numbers import join_names
from ..core.regular_files import check_regular
from ..core.torch_files import damaged_file, load_torch_file

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def split_key(spec: str) -> tuple[Path, str | None]:
    """`FILE:key` in its parts; a colon that belongs to the file's own name is respected."""
    if os.path.lexists(spec):
        return Path(spec), None
    for at in (i for i, char in enumerate(spec) if char == ":"):
        if os.path.isfile(spec[:at]):
            return Path(spec[:at]), spec[at + 1 :]
    raise NannyError(f"{spec}: there is no such file; name a .pt, .safetensors or .npy file, with :KEY behind it or not")


def load_tensor(spec: str) -> tuple[Any, str]:
    """The tensor and its name in the report."""
    path, key = split_key(spec)
    if path.is_dir():
        raise NannyError(f"{path}: this is a folder; name a .pt, .safetensors or .npy file in it")
    suffix = path.suffix.lower()
    try:
        check_regular(path)
        if suffix == ".safetensors":
            return _from_safetensors(path, key)
        if suffix == ".npy":
            return _from_numpy(path, key)
        if suffix in TORCH_SUFFIXES:
            tensors = flatten(load_torch_file(path))
            name = _chosen_key(path, list(tensors), key)
            return tensors[name], name or path.name
    except OSError as error:
        raise NannyError(f"{path}: cannot be read ({error.strerror or error}); name another file") from None
    raise NannyError(f"{path}: unknown kind of file; use .pt (also .pth, .bin, .ckpt), .safetensors or .npy")


def flatten(content: Any, prefix: str = "") -> dict[str, Any]:
    """Every tensor inside nested dictionaries, lists and tuples, with its path as the key."""
    import torch

    if isinstance(content, torch.Tensor):
        return {prefix: content}
    if isinstance(content, Mapping):
        items = [(str(name), value) for name, value in content.items()]
    elif isinstance(content, (list, tuple)):
        items = [(str(i), value) for i, value in enumerate(content)]
    else:
        return {}
    out: dict[str, Any] = {}
    for name, value in items:
        out |= flatten(value, f"{prefix}.{name}" if prefix else name)
    return out


def _chosen_key(path: Path, keys: list[str], key: str | None) -> str:
    if not keys:
        raise NannyError(f"{path}: holds no tensor")
    if keys == [""] and key is None:
        return ""
    if keys == [""]:
        raise NannyError(f"{path}: holds a single tensor without keys; leave out ':{key}'")
    if key is None and len(keys) == 1:
        return keys[0]
    if key is None:
        raise NannyError(f"{path}: holds {len(keys)} tensors; name one as {path}:KEY, with KEY one of: {join_names(keys, 20)}")
    if key not in keys:
        near = difflib.get_close_matches(key, keys, 5, 0.5)
        offer = f"did you mean {' or '.join(near)}" if near else f"it has: {join_names(keys, 20)}"
        raise NannyError(f"{path}: there is no tensor {key!r} in it; {offer}")
    return key


def _from_safetensors(path: Path, key: str | None) -> tuple[Any, str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            name = _chosen_key(path, list(file.keys()), key)
            return file.get_tensor(name), name
    except SafetensorError:
        raise damaged_file(path, "safetensors") from None


def _from_numpy(path: Path, key: str | None) -> tuple[Any, str]:
    import numpy as np
    import torch

    if key is not None:
        raise NannyError(f"{path}: a .npy file holds a single array without keys; leave out ':{key}'")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)  # mapped: a size that the file has not is refused
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - on bytes that are no array, numpy's reader raises almost anything
        if "Python objects" in str(error):
            raise NannyError(
                f"{path}: loading it would run code from the file, which nanny never does; save a numeric array"
            ) from None
        raise damaged_file(path, "numpy.save") from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise NannyError(f"{path}: an archive of arrays, not one array; save one with numpy.save")
    try:
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="))), path.name
    except TypeError:
        raise NannyError(f"{path}: torch has no type for numpy's {array.dtype}; save it as float32") from None
