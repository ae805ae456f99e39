"""Files that torch.save wrote, read without ever running code from them. Torch is imported only when one is read."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .finding import NannyError
from .regular_files import check_regular

SMALL = 1 << 24  # elements that are looked at even if the file repeats a few values for all of them
DEEPEST, MOST_HOLDERS = 100, 1_000_000  # lists and dictionaries


def load_torch_file(path: Path) -> Any:
    import torch

    check_regular(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # guesses about damaged pickles; the error says it better
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - on bytes that are no checkpoint, torch's reader raises almost anything
        # torch has one exception for code and for damage, and only its text tells them apart
        if isinstance(error, pickle.UnpicklingError) and ("GLOBAL" in str(error) or "Unsupported class" in str(error)):
            raise NannyError(
                f"{path}: loading it would run code from the file, which nanny never does; "
                f"save only tensors: torch.save(model.state_dict(), path)"
            ) from None
        raise damaged_file(path, "torch.save") from None
    _check_size(content, path)
    return content


def _check_size(content: Any, path: Path) -> None:
    """A few bytes can name a structure without end, or a tensor larger than any memory."""
    import torch

    waiting, holders = [(content, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, torch.Tensor):
            if value.layout == torch.strided and value.numel() > SMALL and not value.is_meta:
                stored = value.untyped_storage().nbytes() // value.element_size()
                if stored < value.numel():
                    raise NannyError(
                        f"{path}: holds a tensor of {value.numel()} elements, but only {stored} values; save a clone()"
                    )
            continue
        holders += 1
        if depth > DEEPEST or holders > MOST_HOLDERS:
            raise NannyError(f"{path}: lists and dictionaries in it are nested without end; save only tensors, in one dictionary")
        inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        waiting += [(item, depth + 1) for item in inside if isinstance(item, (torch.Tensor, Mapping, list, tuple))]


def damaged_file(path: Path, writer: str) -> NannyError:
    return NannyError(f"{path}: not a file that {writer} wrote, or it is damaged or cut short; save it again")
