"""One clock: `nanny run`, `watch_model` and `nanny trace` count the same steps of the same program."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from nanny.monitor.watch import MixedPrecisionNanny
from nanny.watch import events
from nanny.watch.steps import PATIENCE, StepClock

ITERATIONS = 4


def plain() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(ITERATIONS):
        model(torch.randn(3, 2)).sum().backward()
        optimizer.step()


def accumulated() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(ITERATIONS):
        for _ in range(3):
            model(torch.randn(3, 2)).sum().backward()
        optimizer.step()


def skipped() -> None:
    model = nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**120)
    for _ in range(ITERATIONS):
        scaler.scale(model(torch.randn(3, 2)).sum() * 1e30).backward()
        scaler.step(optimizer)
        scaler.update()


def gan_that_makes_its_fakes_anew() -> None:
    generator, judge = nn.Linear(2, 2), nn.Linear(2, 1)
    of_generator, of_judge = torch.optim.SGD(generator.parameters(), 0.1), torch.optim.SGD(judge.parameters(), 0.1)
    for _ in range(ITERATIONS):
        (judge(torch.randn(3, 2)) - judge(torch.randn(3, 2))).sum().backward()
        of_judge.step()
        judge(generator(torch.randn(3, 2))).sum().backward()
        of_generator.step()


def gan_that_uses_its_fakes_twice() -> None:
    generator, judge = nn.Linear(2, 2), nn.Linear(2, 1)
    of_generator, of_judge = torch.optim.SGD(generator.parameters(), 0.1), torch.optim.SGD(judge.parameters(), 0.1)
    for _ in range(ITERATIONS):
        fake = generator(torch.randn(3, 2))
        judge(fake.detach()).sum().backward()
        of_judge.step()
        judge(fake).sum().backward()
        of_generator.step()


def masters_in_fp32() -> None:
    model = nn.Linear(2, 1).bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, 0.1)
    for _ in range(ITERATIONS):
        model(torch.randn(3, 2).bfloat16()).sum().backward()
        for master, p in zip(masters, model.parameters()):
            master.grad = p.grad.float()
        optimizer.step()


def evaluated_in_between() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(ITERATIONS):
        model(torch.randn(3, 2)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.eval()(torch.randn(3, 2))
        model.train()


def solve(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(16, 2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x[:, :1]).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def closure() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for _ in range(ITERATIONS):
        solve(model, optimizer)


def closure_of_a_new_optimizer_each_time() -> None:
    model = nn.Linear(2, 1)
    for _ in range(ITERATIONS):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)  # may lie where the one before the last did
        solve(model, optimizer)


def teacher_and_then_student() -> None:
    teacher, student = nn.Linear(2, 1), nn.Linear(2, 1)
    of_teacher, of_student = torch.optim.SGD(teacher.parameters(), 0.1), torch.optim.SGD(student.parameters(), 0.1)
    for i in range(ITERATIONS):
        x = torch.randn(3, 2)
        model, optimizer = (teacher, of_teacher) if i < ITERATIONS // 2 else (student, of_student)
        model(x).sum().backward()
        optimizer.step()


PROGRAMS = [plain, accumulated, skipped, gan_that_makes_its_fakes_anew, gan_that_uses_its_fakes_twice, masters_in_fp32]
PROGRAMS += [evaluated_in_between, closure, closure_of_a_new_optimizer_each_time, teacher_and_then_student]


@pytest.mark.quick(5)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_every_program_has_as_many_steps_as_iterations(program: Callable[[], None]):
    begun = []
    with StepClock(begun.append) as clock:
        program()
    assert (clock.step + 1, len(begun)) == (ITERATIONS, ITERATIONS)
    assert not events.is_heard(clock)


@pytest.mark.quick(3)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_the_monitor_counts_alike(program: Callable[[], None], tmp_path):
    nanny = MixedPrecisionNanny(None, output_dir=tmp_path, live=False, strict=True)
    nanny.steps_by_themselves(find_models=True)
    try:
        program()
    finally:
        nanny.close()
    assert nanny._steps == ITERATIONS


def test_of_a_given_model_other_optimizers_do_not_count():
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer, others = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)
    with StepClock(lambda _: None, [model]) as clock:
        for _ in range(ITERATIONS):
            for _ in range(2):
                other(torch.randn(3, 2)).sum().backward()
                others.step()
                model(torch.randn(3, 2)).sum().backward()
            optimizer.step()
    assert clock.step + 1 == ITERATIONS


def test_one_optimizer_that_steps_alone_again_and_again_is_not_waited_for_another():
    generator, judge = nn.Linear(2, 2), nn.Linear(2, 1)
    of_judge = torch.optim.SGD(judge.parameters(), 0.1)
    with StepClock(lambda _: None) as clock:
        for _ in range(10):
            judge(generator(torch.randn(3, 2))).sum().backward()
            of_judge.step()
    assert clock.step + 1 == 9  # nobody knew at the first step that no optimizer was to come for the other model


def test_without_an_optimizer_of_torch_each_backward_counts_after_a_while():
    model = nn.Linear(2, 1)
    with StepClock(lambda _: None) as clock:
        for _ in range(PATIENCE + 3):
            model(torch.randn(3, 2)).sum().backward()
    assert clock.step == 3


def test_the_optimizer_of_a_second_phase_has_steps_of_its_own():
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    first, second = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(model[1].parameters(), 0.1)
    with StepClock(lambda _: None) as clock:
        for optimizer in (first, second):  # the first one stays alive
            for _ in range(ITERATIONS):
                model(torch.randn(3, 2)).sum().backward()
                optimizer.step()
    assert clock.step + 1 == 2 * ITERATIONS


@pytest.mark.parametrize("by", ["backward", "grad"])
def test_weights_that_the_loop_moves_itself_end_a_step(by: str):
    model = nn.Linear(2, 1)
    with StepClock(lambda _: None) as clock:
        for _ in range(ITERATIONS):
            for _ in range(2):  # micro-batches
                loss = model(torch.randn(3, 2)).sum()
                if by == "backward":
                    loss.backward()
                else:
                    gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for i, p in enumerate(model.parameters()):
                    p.sub_(0.1 * (p.grad if by == "backward" else gradients[i]))
                    p.grad = None
    assert clock.step + 1 == ITERATIONS


def test_weights_that_are_filled_after_a_first_look_are_no_step():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with StepClock(lambda _: None) as clock:
        model(torch.randn(3, 2))
        nn.init.zeros_(model.weight)
        for _ in range(ITERATIONS):
            model(torch.randn(3, 2)).sum().backward()
            optimizer.step()
    assert clock.step + 1 == ITERATIONS
