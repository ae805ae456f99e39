"""The carried twins are the FP32 run itself, and the program that carries them is not disturbed by a bit."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nanny.watch.twins import Twins


class Block(nn.Module):
    """Attention, dropout, views, in-place activation, residuals."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(32, width))

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        weights = F.dropout((q @ k.transpose(-2, -1) / 3).softmax(-1), 0.1, self.training)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, w))
        x = x.clone()
        x += self.mlp(x)
        return x


class Network(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.conv = nn.Conv1d(8, 16, 3, padding=1)
        self.bn = nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("seen", torch.zeros(16))
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = F.max_pool1d(self.bn(self.conv(x)), 2).transpose(1, 2)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        self.seen.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        x[:, 0] *= 2
        noise = torch.randn_like(x)
        return self.head(x + 0.01 * noise).mean(1)


def network(recompute: bool = False) -> Network:
    torch.manual_seed(0)
    return Network(recompute)


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 8, 12, generator=generator), torch.randint(0, 5, (4,), generator=generator)


def train_once(model, dtype=None, twins=None, scale=1.0):
    """One forward and backward; the loss, the gradients, the buffers and the random state after it."""
    x, y = batch()
    torch.manual_seed(7)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        if twins is None:
            loss = F.cross_entropy(model(x), y)
            (loss * scale).backward()
        else:
            with twins:
                loss = F.cross_entropy(model(x), y)
                (loss * scale).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return loss.detach(), grads, dict(model.named_buffers()), torch.get_rng_state()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("own", [False, True], ids=["plain", "own"])
def test_twins_are_bit_equal_to_a_separate_fp32_run_and_the_watched_run_to_an_unwatched_one(dtype, recompute, own):
    reference_loss, reference_grads, reference_buffers, _ = train_once(network(recompute))
    loss, grads, buffers, rng = train_once(network(recompute), dtype)
    twins = Twins(own=own)
    watched_loss, watched_grads, watched_buffers, watched_rng = train_once(network(recompute), dtype, twins)

    assert torch.equal(watched_loss, loss)
    assert torch.equal(watched_rng, rng)
    assert all(torch.equal(watched_grads[name], grads[name]) for name in grads)
    assert all(torch.equal(watched_buffers[name], buffers[name]) for name in buffers)

    assert not twins.reseeds
    assert torch.equal(twins.twin(watched_loss), reference_loss)
    assert not torch.equal(watched_loss, reference_loss)
    assert all(torch.equal(twins.twin(watched_grads[name]), reference_grads[name]) for name in grads)
    assert all(torch.equal(twins.twin(watched_buffers[name]), reference_buffers[name]) for name in buffers)


def test_fp64_twins_equal_a_separate_fp64_run():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16), Twins(torch.float64) as twins:
        y = model(x)
        y.sum().backward()
    carried = [twins.twin(y), *(twins.twin(p.grad) for p in model.parameters())]
    model.double().zero_grad()
    wide = model(x.double())
    wide.sum().backward()
    assert all(torch.equal(twin, exact) for twin, exact in zip(carried, [wide, *(p.grad for p in model.parameters())]))


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_noise_is_the_same_draw_in_the_program_and_in_its_twins(wide):
    with Twins(wide) as twins:
        noise = torch.randn_like(torch.zeros(64, dtype=torch.bfloat16))
    assert torch.equal(twins.twin(noise).bfloat16(), noise)


def test_weights_cast_before_the_run_get_their_fp32_values_as_reference():
    torch.manual_seed(0)
    wide, low = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16)
    low.load_state_dict(wide.state_dict())
    x = torch.randn(4, 8)
    narrow = x.bfloat16()
    with Twins() as twins:
        for small, large in [(narrow, x), *zip(low.parameters(), wide.parameters())]:
            twins.adopt(small, large)
        y = low(narrow)
    assert torch.equal(twins.twin(y), wide(x))
    assert torch.equal(y, low(narrow))


def test_a_decision_that_differs_is_followed_by_the_reference():
    x = torch.tensor([[1.0, 1.001], [1.0, 3.0]])
    table = torch.tensor([10.0, 20.0])
    with Twins() as twins:
        low = x.bfloat16()
        picked = table[low.argmax(-1)] * low.sum()
    assert torch.equal(twins.twin(picked), table[x.argmax(-1)] * x.sum())
    assert picked[0] != twins.twin(picked)[0]


def test_a_shape_that_depends_on_the_values_starts_anew_and_says_so():
    x = torch.tensor([1.001, 1.0, 2.0])
    with Twins() as twins:
        low = x.bfloat16()
        kept = low[low > 1.0]
    assert kept.tolist() == [2.0]
    assert [op for op, _ in twins.reseeds] == ["nonzero"] or [op for op, _ in twins.reseeds] == ["index"]
    assert twins.twin(kept).dtype == torch.float32


def test_twins_die_with_the_storages_they_belong_to():
    with Twins() as twins, torch.no_grad():
        x = torch.randn(256, 256, dtype=torch.bfloat16)
        for _ in range(200):
            x = x + 1
    gc.collect()
    assert twins.bytes_held <= 4 * 256 * 256 * 4


def test_a_frame_tells_the_error_it_makes_from_the_error_it_is_given():
    x = torch.linspace(1, 2, 64)
    with Twins(own=True) as twins:
        bad = (x.bfloat16() + 1000) - 1000  # inherited by what follows
        with twins.frame():
            y = bad * 2
            own = twins.own_value(y)
    assert own.dtype == torch.bfloat16
    exact = twins.twin(y)
    assert (y.float() - exact).norm() > 50 * (own.float() - exact).norm()


def test_operations_are_reported_with_both_results():
    seen = []
    with Twins(on_op=seen.append):
        torch.ones(4, dtype=torch.float16) * 300 * 300
    assert [op.name for op in seen][-1] == "mul"
    assert torch.isinf(seen[-1].out).all()
    assert (seen[-1].twin_out == 90000).all()
