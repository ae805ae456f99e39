"""What a second run of a model could change: found without a touch, put back as it was."""

from __future__ import annotations

import collections
import functools
import itertools
import threading
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from nanny.watch.python_state import Reached


class MakesWhatItIsAskedFor(collections.OrderedDict):  # type: ignore[type-arg]
    """Of classes; a look-up gives one of them, as in the table of activations of a well-known library."""

    made = 0

    def __getitem__(self, key: str) -> Any:
        MakesWhatItIsAskedFor.made += 1
        return super().__getitem__(key)()


TABLE = MakesWhatItIsAskedFor(relu=nn.ReLU, tanh=nn.Tanh)
NUMBERS = itertools.count()
LOCK = threading.Lock()


class Model(nn.Module):
    shared: ClassVar = [0]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.table = TABLE

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def upload(self) -> int:
        return next(NUMBERS)


class Counts(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.shared[0] += 1
        TABLE["sigmoid"] = nn.Sigmoid
        return self.layer(x)


class ByName(Model):
    def forward(self, x: Tensor) -> Tensor:
        getattr(self, "upload")()  # noqa: B009
        return self.layer(x)


class Guarded(Model):
    def forward(self, x: Tensor) -> Tensor:
        with LOCK:
            return self.layer(x)


class Slim:
    __slots__ = ("calls", "never")

    def __init__(self) -> None:
        self.calls = 0


class WithSlots(Model):
    def __init__(self) -> None:
        super().__init__()
        self.slim = Slim()

    def forward(self, x: Tensor) -> Tensor:
        self.slim.calls += 1
        return self.layer(x)


def test_a_table_that_makes_things_is_not_asked_and_stays_what_it_was() -> None:
    made, model = MakesWhatItIsAskedFor.made, Counts()
    reached = Reached([model, (torch.ones(1, 2),)])
    assert reached.obstacle == ""
    assert reached.is_untouched()
    model(torch.ones(1, 2))
    assert not reached.is_untouched()
    reached.put_back()
    assert reached.is_untouched()
    assert MakesWhatItIsAskedFor.made == made
    assert list(collections.OrderedDict.items(TABLE)) == [("relu", nn.ReLU), ("tanh", nn.Tanh)]
    assert list(TABLE) == ["relu", "tanh"]
    assert Model.shared == [0]


@pytest.mark.parametrize(("kind", "is_free"), [(Model, True), (ByName, False)])
def test_what_forward_does_not_name_is_no_obstacle(kind: type[Model], is_free: bool) -> None:
    assert (Reached([kind(), ()]).obstacle == "") == is_free


def test_slots_are_put_back() -> None:
    model = WithSlots()
    reached = Reached([model, ()])
    model(torch.ones(1, 2))
    assert (reached.obstacle, reached.is_untouched()) == ("", False)
    reached.put_back()
    assert (model.slim.calls, hasattr(model.slim, "never")) == (0, False)


def test_a_lock_is_an_obstacle_where_others_may_hold_it() -> None:
    assert Reached([Guarded(), ()]).obstacle == ""
    with LOCK:
        assert "lock" in Reached([Guarded(), ()]).obstacle
    done = threading.Event()

    def works() -> None:
        done.wait()

    other = threading.Thread(target=works)
    other.start()
    try:
        assert "lock" in Reached([Guarded(), ()]).obstacle
    finally:
        done.set()
        other.join()


@pytest.mark.landing
def test_the_code_of_a_library_of_models_is_no_obstacle() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.activations import ACT2FN

    config = transformers.BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, max_position_embeddings=8
    )
    reached = Reached([transformers.BertModel(config), (torch.zeros(1, 4, dtype=torch.long),)])
    assert reached.obstacle == ""
    assert reached.is_untouched()
    reached.put_back()
    assert isinstance(ACT2FN["gelu"], nn.Module)


@functools.lru_cache(maxsize=2)
def rows(count: int, width: int = 2) -> list[int]:
    return [width] * count


class Cached(Model):
    def __init__(self) -> None:
        super().__init__()
        self.own = functools.lru_cache(typed=True)(self.upload)

    @functools.cache  # noqa: B019
    def of_method(self, name: str) -> list[str]:
        return [name]

    @staticmethod
    @functools.lru_cache(maxsize=1)
    def of_class(kind: type) -> dict[str, Any]:
        return {kind.__name__: kind}

    def asked(self) -> list[Any]:
        return [rows(3), rows(1, width=4), self.of_method("a"), self.of_class(int), self.own()]

    def forward(self, x: Tensor) -> Tensor:
        self.asked()
        return self.layer(x)

    def counters(self) -> list[Any]:
        return [f.cache_info() for f in (rows, type(self).of_method, self.of_class, self.own)]


def test_caches_of_functions_answer_from_a_copy_until_all_is_put_back() -> None:
    model = Cached()
    answers, counters = model.asked(), model.counters()
    reached = Reached([model])
    reached.hide_caches()
    assert all(now is before for now, before in zip(model.asked(), answers))
    assert rows(5) is rows(5)  # one more than it may hold, and it drops none
    assert model.of_class(str) == {"str": str}
    assert reached.is_untouched()
    reached.put_back()
    assert reached.is_untouched()
    assert model.counters() == counters
    assert all(now is before for now, before in zip(model.asked(), answers))
