"""An examined step is the step as it would have been: bits, random numbers, exceptions, hooks, memory."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from corpus import BF16, BOTH, FP16, by_name
from corpus.asking import SHORT, built
from corpus.draws import noise
from torch import nn

from nanny import NannyError, sanitize
from nanny.examine import sanitizer as sanitizer_module
from nanny.examine.sanitizer import Sanitizer

torch.set_num_threads(1)


def state_after(name: str, dtype: torch.dtype, examine: bool) -> list[torch.Tensor]:
    program = built(by_name()[name], dtype)
    torch.manual_seed(1)
    program.step(0)
    if examine:
        with sanitize(program.model, program.scaler, strict=True):
            program.step(0)
    else:
        program.step(0)
    program.step(0)
    grads = [p.grad.clone() for p in program.model.parameters() if p.grad is not None]
    return [*program.model.state_dict().values(), *grads, torch.get_rng_state()]


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    "name", ["fused_attention_and_checkpointing", "convnet", "diffusion_of_vectors", "adversarial_pair", "lstm"]
)
@pytest.mark.parametrize("dtype", BOTH, ids=SHORT.get)
def test_weights_gradients_and_random_numbers_are_bit_identical(name, dtype):
    plain, watched = (state_after(name, dtype, examine) for examine in (False, True))
    assert len(plain) == len(watched)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))


def test_the_programs_own_exception_passes_and_nothing_stays_behind():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def step():
        model(torch.randn(2, 4))
        return 1 / 0

    with pytest.raises(ZeroDivisionError), sanitize(model):
        step()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert all(p._post_accumulate_grad_hooks in (None, {}) for p in model.parameters())
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_mistake_of_ours_ends_the_examination_and_not_the_training(monkeypatch):
    def broken(*_):
        raise IndexError("planted")

    monkeypatch.setattr(sanitizer_module.Follower, "see", broken)
    program = built(by_name()["frozen_and_unused_parts"], BF16)
    before = copy.deepcopy(program.model.state_dict())
    with sanitize(program.model) as seen:
        program.step(0)
    assert any(not torch.equal(a, b) for a, b in zip(before.values(), program.model.state_dict().values()))
    assert "planted" in seen.examination.facts["failed"]
    assert "planted" in str(seen)
    with pytest.raises(IndexError), sanitize(program.model, strict=True):
        program.step(0)


def test_over_the_cap_the_reference_begins_anew_and_it_is_said():
    torch.manual_seed(0)
    program = built(by_name()["transformer"], BF16)
    sanitizer = Sanitizer([(program.model, "")], twin_bytes=200_000, strict=True).open()
    most = 0
    twins = sanitizer._shadows
    forget = twins._forget

    def forgetting():
        nonlocal most
        most = max(most, twins.bytes_held)
        forget()

    twins._forget = forgetting
    program.step(0)
    examination = sanitizer.close()
    assert "MiB" in examination.facts["left_out"]
    assert "began anew" in examination.facts["left_out"]
    assert 200_000 < most < 600_000
    assert examination.gradients  # it went on to the end
    assert examination.loss is not None


def test_nothing_of_the_step_is_kept_alive():
    model = nn.Linear(8, 8)
    kept: list[weakref.ref] = []
    with sanitize(model) as seen:
        x = torch.randn(4, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model(x)
        kept += [weakref.ref(x), weakref.ref(hidden)]
        hidden.float().sum().backward()
        del x, hidden
    assert seen.hazards == ()
    assert all(ref() is None for ref in kept)


def test_pure_fp32_needs_no_twins_and_still_finds_what_is_singular():
    model = nn.Linear(4, 1)
    x = torch.zeros(3, 4)
    with sanitize(model, strict=True) as seen:
        ((model(x) - model.bias) * 1.0).pow(2).sum(-1).sqrt().sum().backward()
    assert seen.examination.amp_dtype == ""
    assert seen.examination.gradient_error is None
    assert [(h.kind, h.cause, h.in_reference) for h in seen.hazards] == [("singular_backward", "singular_gradient", True)]


def test_the_result_is_read_after_the_block():
    with sanitize(nn.Linear(2, 2)) as seen, pytest.raises(NannyError, match="no step has been examined yet"):
        _ = seen.hazards


def test_what_is_no_module_is_refused():
    with pytest.raises(NannyError, match=r"nn\.Module"):
        sanitize(lambda x: x)


def test_a_second_close_changes_nothing():
    model = nn.Linear(2, 2)
    sanitizer = Sanitizer([(model, "")], step=3).open()
    F.mse_loss(model(noise(2, 2)), noise(2, 2)).backward()
    assert sanitizer.close() is sanitizer.close()
    assert sanitizer.close().step == 3


def test_examinations_may_follow_one_another():
    program = built(by_name()["variational"], BF16)
    for _ in range(3):
        with sanitize(program.model, strict=True) as seen:
            program.step(0)
        assert seen.hazards == ()


def test_gradients_and_loss_are_told_unscaled():
    torch.manual_seed(0)
    program = built(by_name()["contrastive_pairs"], FP16)
    wide = copy.deepcopy(program.model)
    with sanitize(program.model, program.scaler, strict=True) as seen:
        program.step(0)
    examination = seen.examination
    a, b = (F.normalize(wide(noise(32, 16) + 0.1 * noise(32, 16, key=s)), dim=-1) for s in (5, 6))
    loss = F.cross_entropy(a @ b.T / 0.1, torch.arange(32))
    loss.backward()
    assert examination.scale == 1024.0
    assert examination.loss_reference == pytest.approx(loss.item(), rel=1e-6)
    for gradient in examination.gradients:
        exact = float(wide.get_parameter(gradient.name).grad.norm())
        assert gradient.reference_norm == pytest.approx(exact, rel=1e-5)
        assert gradient.norm == pytest.approx(exact, rel=0.02)


def test_a_compiled_model_is_left_to_the_compiler_and_the_way_out_is_said_and_works():
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")

    def examined():
        with sanitize(compiled) as seen:
            compiled(torch.ones(1, 2)).sum().backward()
        return seen.examination

    assert "force_eager" in examined().facts["left_out"]
    with torch.compiler.set_stance("force_eager"):
        eager = examined()
    assert "left_out" not in eager.facts
    assert eager.gradients
