"""Loops that a user writes: windows of accumulation, closures, models that are never called themselves, several models."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from training import recorded, scalar

from nanny import MixedPrecisionNanny
from nanny.integrations.loops import watch

OPTIONS = {"live": False, "strict": True}


def by_itself(folder, first=None):
    nanny = MixedPrecisionNanny(None, output_dir=folder, **OPTIONS)
    nanny.steps_by_themselves(find_models=True, first=first)
    return nanny


class Module(nn.Module):
    """As a framework's: its training step calls parts, nobody calls itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def training_step(self, x):
        return self.head(torch.relu(self.encoder(x))).square().mean()


def batches(count):
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(6, 4, generator=draw) for _ in range(count)]


def test_the_loss_of_a_window_is_that_of_its_whole_batch(tmp_path):
    model = Module()
    optimizer = SGD(model.parameters(), 0.0)
    data = batches(6)
    with by_itself(tmp_path):
        for i, x in enumerate(data):
            (model.training_step(x) / 3).backward()
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    whole = [model.training_step(torch.cat(data[i : i + 3])).item() for i in (0, 3)]
    assert list(scalar(tmp_path, "loss").values()) == pytest.approx(whole, rel=1e-6)


def test_the_loss_of_a_window_is_the_same_where_the_optimizer_has_copies(tmp_path):
    model = Module()
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = SGD(masters, 0.0)
    data = batches(2)
    with watch(model, output_dir=tmp_path, **OPTIONS) as nanny, nanny.step(0):
        for x in data:
            (model.training_step(x) / 2).backward()
        for master, p in zip(masters, model.parameters()):
            master.grad = p.grad
        optimizer.step()
    whole = model.training_step(torch.cat(data)).item()
    assert list(scalar(tmp_path, "loss").values()) == pytest.approx([whole], rel=1e-6)


def test_of_two_updates_in_a_step_the_average_loss_is_told(tmp_path):
    models = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizers = [SGD(m.parameters(), 0.0) for m in models]
    losses = []
    with by_itself(tmp_path):
        for x in batches(3):
            for model, optimizer in zip(models, optimizers):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                losses.append(loss.item())
                loss.backward()
                optimizer.step()
    averages = [(losses[2] + losses[3]) / 2, (losses[4] + losses[5]) / 2]  # in the first step nobody knows of the second
    assert list(scalar(tmp_path, "loss").values())[1:] == pytest.approx(averages, rel=1e-6)


def test_a_module_that_nobody_calls_is_found_by_its_parts_and_gives_them_their_names(tmp_path):
    model = Module()
    optimizer = SGD(model.parameters(), 0.01)
    with by_itself(tmp_path):
        for x in batches(3):
            model.training_step(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert set(recorded(tmp_path, "grad", 0)) == {"encoder.weight", "encoder.bias", "head.weight", "head.bias"}
    assert list(scalar(tmp_path, "loss")) == [0, 1, 2]


def test_models_of_one_class_have_names_of_their_own(tmp_path):
    models = [nn.Linear(4, 4) for _ in range(3)]
    optimizer = SGD([p for m in models for p in m.parameters()], 0.01)
    with by_itself(tmp_path):
        for x in batches(2):
            for model in models:
                x = model(x)
            x.sum().backward()
            optimizer.step()
    assert {n for n in recorded(tmp_path, "grad", 1) if n.endswith("weight")} == {"weight", "Linear.weight", "Linear2.weight"}


@pytest.mark.parametrize("clips", [False, True])
def test_forward_and_backward_inside_the_optimizer_are_seen_like_those_before_it(tmp_path, clips):
    """As Lightning runs them; the gradients are those before clipping, and what the update did is measured."""
    model, folders = Module(), (tmp_path / "inside", tmp_path / "before")

    def backward(x, optimizer):
        optimizer.zero_grad()
        loss = 100 * model.training_step(x)
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    for inside, folder in zip((True, False), folders):
        model = Module()
        optimizer = SGD(model.parameters(), 1e-4)
        with by_itself(folder):
            for x in batches(3):
                if inside:
                    optimizer.step(lambda x=x, optimizer=optimizer: backward(x, optimizer))
                else:
                    backward(x, optimizer)
                    optimizer.step()
    for curve in ("loss", "grad_norm", "lr"):
        assert scalar(folders[0], curve) == scalar(folders[1], curve) != {}
    for curve in ("unchanged_share", "update_ratio"):  # after the first step probed as the time allows
        inside, before = (scalar(folder, curve) for folder in folders)
        assert 0 in inside.keys() & before.keys()
        assert all(inside[step] == before[step] for step in inside.keys() & before.keys())


def test_a_closure_is_handed_on_with_what_it_returns():
    model = Module()
    nanny = MixedPrecisionNanny(model, output_dir=None, **OPTIONS)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = batches(1)[0]

    def closure():
        optimizer.zero_grad()
        loss = model.training_step(x)
        loss.backward()
        return loss

    first = closure().item()
    with nanny, nanny.step(0):
        assert optimizer.step(closure).item() == first
        assert optimizer.step(closure=closure).item() < first


def test_a_resumed_training_goes_on_at_the_count_of_its_optimizer(tmp_path):
    model = Module()
    optimizer = AdamW(model.parameters(), 1e-3)

    def train(steps):
        for x in batches(steps):
            model.training_step(x).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(5)
    saved = optimizer.state_dict()
    optimizer = AdamW(model.parameters(), 1e-3)
    optimizer.load_state_dict(saved)
    with by_itself(tmp_path):
        train(3)
    assert list(scalar(tmp_path, "loss")) == [5, 6, 7]


def test_several_models_are_one_run_and_its_steps_are_numbered_as_told(tmp_path):
    generator, judge = nn.Linear(2, 4), nn.Linear(4, 1)
    teacher = nn.Linear(4, 1).requires_grad_(False)
    of_generator, of_judge = SGD(generator.parameters(), 0.01), SGD(judge.parameters(), 0.01)
    with watch(generator, judge, first_step=40, output_dir=tmp_path, **OPTIONS) as nanny:
        for x in batches(3):
            fake = generator(torch.randn(6, 2))
            (judge(x) - judge(fake.detach())).mean().backward()
            of_judge.step()
            (judge(fake) - teacher(fake)).mean().backward()
            of_generator.step()
            of_judge.zero_grad()
            of_generator.zero_grad()
            with torch.no_grad():
                judge.eval()(x)
                judge.train()
    assert list(scalar(tmp_path, "loss")) == [40, 41, 42]
    assert set(recorded(tmp_path, "grad", 40)) == {"weight", "bias", "Linear.weight", "Linear.bias"}
    assert nanny.verdict("finished").word == "HEALTHY"


class LetsGo(nn.Module):
    """As FSDP2: the whole weight has no memory between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 300.0))

    def forward(self, x):
        whole = self.weight.half()
        out = x.half() @ whole
        kept, memory = whole.detach().clone(), whole.untyped_storage()
        memory.resize_(0)

        def bring_back(_):
            memory.resize_(kept.untyped_storage().nbytes())
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(whole):
                whole.copy_(kept)

        out.register_hook(bring_back)
        return out


def test_a_bad_loss_is_told_although_the_memory_of_a_weight_is_gone_by_then(tmp_path):
    model = LetsGo()
    optimizer = SGD(model.parameters(), 0.0)
    with watch(model, output_dir=tmp_path, trace_interval=100, examine="off", **OPTIONS) as nanny:
        for step in range(8):
            given = torch.full((2, 4), 300.0 if step == 5 else 1.0, requires_grad=True)  # else torch keeps no weight for backward
            model(given).float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    first = nanny.findings[0]
    assert (first.step, nanny.verdict("finished").word) == (5, "NOT HEALTHY")


def test_of_two_updates_in_a_step_the_loss_is_told_that_was_bad_first_not_the_weights_that_it_spoilt(tmp_path):
    torch.manual_seed(0)
    generator, judge = nn.Linear(2, 4), nn.Linear(4, 1)
    of_generator, of_judge = SGD(generator.parameters(), 0.01), SGD(judge.parameters(), 0.01)
    with watch(generator, judge, output_dir=tmp_path, **OPTIONS) as nanny:
        for x in batches(2):
            fake = generator(torch.randn(6, 2))
            (torch.log(judge(x) * 0) * 0).mean().backward()  # 0 times the logarithm of 0
            of_judge.step()
            judge(fake).mean().backward()
            of_generator.step()
    assert [(f.code, f.step) for f in nanny.findings[:1]] == [("INF", 0)]
