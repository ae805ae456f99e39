"""What is kept beside a program follows what the program uses and what is left to it."""

from __future__ import annotations

import torch

from nanny.watch import memory
from nanny.watch.memory import ENOUGH, SHARE, MemoryBudget

CPU = torch.device("cpu")


def budget(monkeypatch, used: int, free: int) -> MemoryBudget:
    monkeypatch.setattr(memory, "used_bytes", lambda device: used)
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    return MemoryBudget(CPU)


def test_a_small_program_needs_no_thought_and_a_large_one_a_share(monkeypatch):
    assert budget(monkeypatch, 1 << 20, 1 << 40).allowance(0) == ENOUGH
    assert budget(monkeypatch, 10 << 30, 1 << 40).allowance(0) == int(SHARE * (10 << 30))


def test_where_little_is_left_half_of_it_is_taken_and_given_back_as_the_program_grows(monkeypatch):
    assert budget(monkeypatch, 10 << 30, 200 << 20).allowance(held=0) == 100 << 20
    assert budget(monkeypatch, 10 << 30, 60 << 20).allowance(held=100 << 20) == 80 << 20


def test_where_less_than_enough_is_left_there_is_a_shortage_and_what_is_kept_counts_as_free(monkeypatch):
    tight = budget(monkeypatch, 10 << 30, ENOUGH - 1)
    assert not tight.shortage
    tight.allowance(held=0)
    assert tight.shortage == "only 127 MiB of memory are free"
    tight.allowance(held=1)
    assert tight.shortage == ""
    assert memory.shortage(CPU)


def test_what_the_step_makes_is_the_programs_and_the_most_counts(monkeypatch):
    tight = budget(monkeypatch, 1 << 30, 1 << 40)
    x = torch.zeros(1 << 20)
    tight.note(x)
    tight.note(x[:2])  # the same memory
    assert tight.allowance(0) == int(SHARE * ((1 << 30) + (4 << 20)))
    del x
    assert tight.allowance(0) == int(SHARE * ((1 << 30) + (4 << 20)))


def test_this_process_has_some_memory_and_uses_some():
    assert memory.used_bytes(CPU) > 1 << 20
    assert 0 < memory.free_bytes(CPU) < 1 << 50


def test_a_limit_of_the_cgroup_counts(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    assert memory.free_bytes(CPU) == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(CPU) > 3000
