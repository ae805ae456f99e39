"""Finding tensors, asking what they are, and keeping something beside their memory."""

from __future__ import annotations

import gc
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from nanny.watch.storages import Buffers, StorageMap
from nanny.watch.tensors import float_leaves, has_storage, is_plain, is_readable, map_leaves, outside_program, tensors_in

Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor]
    note: str = "text"


def test_tensors_are_found_in_order_wherever_they_are():
    a, b, c, d, e = (torch.full((), float(i)) for i in range(5))
    held = (a, 3, [Pair(b, None)], OrderedDict(x={"y": Output(c, [d])}), "text", torch.float16, {"z": e}, Output)
    assert [float(t) for t in tensors_in(held)] == [0, 1, 2, 3, 4]


def test_only_the_first_leaves_of_a_huge_output_are_given():
    assert len(list(float_leaves([torch.ones(1)] * 1000))) == 64


def test_mapped_leaves_keep_their_containers():
    assert map_leaves((1, [2, {"a": 3}], None), lambda v: v if v is None else v + 1) == (2, [3, {"a": 4}], None)


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(2)


TENSORS = {  # is_plain, has_storage, is_readable
    "plain": (lambda: torch.ones(2), (True, True, True)),
    "parameter": (lambda: nn.Linear(1, 1).weight, (True, True, True)),
    "view": (lambda: torch.ones(4)[::2], (True, True, True)),
    "whole_numbers": (lambda: torch.arange(3), (True, True, False)),
    "empty": (lambda: torch.empty(0), (True, False, False)),
    "meta": (lambda: torch.ones(2, device="meta"), (False, False, False)),
    "sparse": (lambda: torch.eye(2).to_sparse(), (False, False, False)),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), (False, False, False)),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), (False, False, False)),
    "fake": (fake, (False, False, False)),
    "lazy": (lambda: nn.LazyLinear(2).weight, (True, False, False)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TENSORS)
def test_what_a_tensor_is(name):
    make, expected = TENSORS[name]
    tensor = make()
    if name == "lazy":  # it has no memory to ask for; nothing at the level of operations ever meets one
        assert is_readable(tensor) is expected[2]
        return
    assert (is_plain(tensor), has_storage(tensor), is_readable(tensor)) == expected


def test_a_value_is_found_through_any_view_and_dies_with_the_memory():
    names: StorageMap[str] = StorageMap()
    x = torch.ones(4)
    names.put(x, "x")
    assert names.find(x[1:].view(3, 1).detach()) == "x"
    assert names.find(torch.ones(4)) is None
    assert names.drop(x.view(2, 2)) == "x"
    assert names.find(x) is None
    for _ in range(10_000):  # addresses are used again by the thousand
        y = torch.ones(4)
        assert names.find(y) is None
        names.put(y, "y")
    del y
    gc.collect()
    assert len(names) <= 128
    names.sweep()
    assert len(names) == 0


def test_a_buffer_follows_views_and_is_given_up_when_its_storage_grows():
    buffers = Buffers()
    x = torch.arange(6.0).bfloat16()
    buffers.put_storage(x, torch.float32)
    assert torch.equal(buffers.find(x.view(2, 3).t()), torch.arange(6.0).view(2, 3).t())
    assert buffers.bytes_held == 24
    x.untyped_storage().resize_(24)
    assert buffers.find(x) is None


def test_outside_the_program_there_is_no_mode_no_graph_and_no_autocast():
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    w = torch.ones(2, 2, requires_grad=True)
    with Mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        with outside_program():
            product = w @ w
        assert torch.is_grad_enabled()
        assert (w @ w).dtype == torch.bfloat16
    assert (product.dtype, product.requires_grad) == (torch.float32, False)
    assert len([f for f in seen if "mm" in str(f)]) == 1


def test_a_list_that_holds_itself_has_an_end():
    cycle: list[object] = [torch.ones(1)]
    cycle.append(cycle)
    assert all(isinstance(t, torch.Tensor) for t in tensors_in(cycle))


def test_a_weight_whose_memory_was_given_back_is_not_read():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    assert is_readable(weight)
    weight.untyped_storage().resize_(0)
    assert not is_readable(weight)
