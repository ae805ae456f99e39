"""Files that torch.save wrote, read without ever running code from them. Torch is imported only when one is read."""

from __future__ import annotations

import pickle
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

from .finding import NannyError

# what torch's reader raises on bytes that are no checkpoint (3000 damaged files tried)
UNREADABLE = (
    RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError, AssertionError, MemoryError, struct.error,
    zipfile.BadZipFile, pickle.UnpicklingError,
)  # fmt: skip


def load_torch_file(path: Path) -> Any:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # guesses about damaged pickles; the error says it better
            return torch.load(path, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        # torch has one exception for code and for damage, and only its text tells them apart
        if isinstance(error, pickle.UnpicklingError) and ("GLOBAL" in str(error) or "Unsupported class" in str(error)):
            raise NannyError(
                f"{path}: loading it would run code from the file, which nanny never does; "
                f"save only tensors: torch.save(model.state_dict(), path)"
            ) from None
        raise damaged_file(path, "torch.save") from None


def damaged_file(path: Path, writer: str) -> NannyError:
    return NannyError(f"{path}: not a file that {writer} wrote, or it is damaged or cut short; save it again")
