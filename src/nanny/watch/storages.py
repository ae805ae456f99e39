"""Flat buffers that stand beside the storages of real tensors: what `shadow` keeps its twins in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_SWEEP_OPS = 64
_SWEEP_BYTES = 4 << 20


def key_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def carried(tensor: Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and tensor.untyped_storage().nbytes() > 0
    )


@dataclass(frozen=True)
class _Beside:
    alive: StorageWeakRef
    element: int  # bytes of one element of the real storage
    buffer: Tensor


class Buffers:
    """Flat buffers that stand beside the storages of real tensors, for as long as those live."""

    def __init__(self) -> None:
        self._held: dict[int, _Beside] = {}
        self._ops = 0
        self._new_bytes = 0

    def find(self, tensor: Tensor) -> Tensor | None:
        beside = self._held.get(key_of(tensor))
        if beside is None:
            return None
        grown = tensor.untyped_storage().nbytes() > beside.buffer.numel() * beside.element
        if beside.alive.expired() or beside.element != tensor.element_size() or grown:
            del self._held[key_of(tensor)]
            return None
        return beside.buffer.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def put(self, tensor: Tensor, value: Tensor, owned: bool) -> Tensor:
        """Enters `value` for a tensor; an `owned` value that fills the same memory layout becomes the buffer itself."""
        storage = tensor.untyped_storage()
        elements = storage.nbytes() // tensor.element_size()
        if (
            owned
            and value.stride() == tensor.stride()
            and value.storage_offset() == tensor.storage_offset() == 0
            and (value.untyped_storage().nbytes() // value.element_size() == elements)
        ):
            buffer = value.as_strided((elements,), (1,), 0)
        else:
            buffer = torch.zeros(elements, dtype=value.dtype, device=tensor.device)
            buffer.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).copy_(value)
        self._held[storage._cdata] = _Beside(StorageWeakRef(storage), tensor.element_size(), buffer)
        self._new_bytes += buffer.untyped_storage().nbytes()
        return buffer.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def put_storage(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Seeds a twin for the whole storage of a tensor, because other views of it may be read later."""
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        whole = tensor.as_strided((elements,), (1,), 0)
        self.put(whole, whole.to(dtype, copy=True), owned=True)
        found = self.find(tensor)
        assert found is not None
        return found

    def drop(self, tensor: Tensor) -> None:
        self._held.pop(key_of(tensor), None)

    def sweep(self) -> None:
        """Forgets what stands beside dead storages: now and then, and soon after much was added."""
        self._ops += 1
        if self._ops >= _SWEEP_OPS or self._new_bytes > _SWEEP_BYTES:
            self._ops = self._new_bytes = 0
            for key in [key for key, beside in self._held.items() if beside.alive.expired()]:
                del self._held[key]

    @property
    def bytes_held(self) -> int:
        return sum(b.buffer.untyped_storage().nbytes() for b in self._held.values() if not b.alive.expired())
