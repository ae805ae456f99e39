"""What is kept beside the storages of tensors, for as long as those live.

A storage and not a tensor is the key: views, results of in-place operations and tensors saved for backward are other Python
objects with the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

V = TypeVar("V")
W = TypeVar("W")
_SWEEP_PUTS = 64
_SWEEP_BYTES = 4 << 20


def key_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class StorageMap(Generic[V]):
    """One value per storage. While its weak reference is held, no other storage gets the address: a key found is right."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[StorageWeakRef, V]] = {}
        self._until_sweep = _SWEEP_PUTS

    def find(self, tensor: Tensor) -> V | None:
        held = self._held.get(tensor.untyped_storage()._cdata)
        return None if held is None else held[1]

    def put(self, tensor: Tensor, value: V) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._held.get(key)
        self._held[key] = (StorageWeakRef(storage) if known is None else known[0], value)
        self._until_sweep -= 1
        if self._until_sweep < 0:
            self.sweep()

    def drop(self, tensor: Tensor) -> V | None:
        held = self._held.pop(tensor.untyped_storage()._cdata, None)
        return None if held is None else held[1]

    def sweep(self) -> None:
        """Forgets what stands beside dead storages; `put` sees to it as often as the map doubles."""
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        self._until_sweep = max(_SWEEP_PUTS, len(self._held))

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: int) -> bool:
        return key in self._held

    def select(self, choose: Callable[[int, V], W | None]) -> StorageMap[W]:
        """Another map of those that live, with what `choose(key, value)` makes of them, if anything."""
        made = ((key, alive, choose(key, value)) for key, (alive, value) in self._held.items() if not alive.expired())
        out: StorageMap[W] = StorageMap()
        out._held = {key: (alive, value) for key, alive, value in made if value is not None}
        return out

    def values(self) -> Iterator[V]:
        return (value for alive, value in self._held.values() if not alive.expired())


@dataclass(frozen=True)
class _Buffer:
    element: int  # bytes of one element of the real storage
    bytes: int  # of that storage, as far as it is held
    flat: Tensor


class Buffers:
    """Flat buffers with as many elements as a storage; a tensor's part has its own size, stride and offset."""

    def __init__(self) -> None:
        self._held: StorageMap[_Buffer] = StorageMap()
        self._new_bytes = 0
        self.bytes_made = 0  # in all

    def find(self, tensor: Tensor) -> Tensor | None:
        buffer = self._held.find(tensor)
        if buffer is None or not self._fits(buffer, tensor):
            return None
        return buffer.flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def has(self, tensor: Tensor) -> bool:
        buffer = self._held.find(tensor)
        return buffer is not None and self._fits(buffer, tensor)

    def _fits(self, buffer: _Buffer, tensor: Tensor) -> bool:
        """Unless its memory has grown, or is read as another type."""
        if buffer.element == tensor.element_size() and tensor.untyped_storage().nbytes() <= buffer.bytes:
            return True
        self._held.drop(tensor)
        return False

    def put(self, tensor: Tensor, value: Tensor, owned: bool) -> Tensor:
        """Enters `value` for a tensor; an `owned` value that fills the same memory layout becomes the buffer itself."""
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        if (
            owned
            and value.stride() == tensor.stride()
            and value.storage_offset() == tensor.storage_offset() == 0
            and (value.untyped_storage().nbytes() // value.element_size() == elements)
        ):
            flat = value.as_strided((elements,), (1,), 0)
        else:
            flat = torch.zeros(elements, dtype=value.dtype, device=tensor.device)
            flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).copy_(value)
        self._new_bytes += flat.untyped_storage().nbytes()
        self.bytes_made += flat.untyped_storage().nbytes()
        if self._new_bytes > _SWEEP_BYTES:  # much was added: memory of the dead is wanted soon
            self._new_bytes = 0
            self._held.sweep()
        self._held.put(tensor, _Buffer(tensor.element_size(), flat.numel() * tensor.element_size(), flat))
        return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def put_storage(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Seeds the whole storage of a tensor, because other views of it may be read later."""
        whole = whole_storage(tensor)
        self.put(whole, whole.to(dtype, copy=True), owned=True)
        found = self.find(tensor)
        assert found is not None
        return found

    def drop(self, tensor: Tensor) -> None:
        self._held.drop(tensor)

    def of_storages(self, chosen: StorageMap[Any]) -> Buffers:
        """Those that belong to storages of a map."""
        out = Buffers()
        out._held = self._held.select(lambda key, buffer: buffer if key in chosen else None)
        return out

    @property
    def bytes_held(self) -> int:
        return sum(buffer.flat.untyped_storage().nbytes() for buffer in self._held.values())


def whole_storage(tensor: Tensor) -> Tensor:
    """A storage from its first to its last element, as the tensor reads them."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
