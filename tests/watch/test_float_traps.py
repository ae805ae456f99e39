"""Work of ours where the program lets the float unit raise SIGFPE."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

try:
    ctypes.CDLL("libm.so.6").fegetexcept()
except (OSError, AttributeError):
    pytest.skip("no glibc", allow_module_level=True)

PROGRAM = """
import ctypes
from nanny.watch.float_traps import Untrapped
libm = ctypes.CDLL("libm.so.6")
libm.feenableexcept(1 | 4)
nan = float("nan")
with Untrapped():
    assert not nan < 1.0
    with Untrapped():
        assert not nan < 1.0
    assert not nan < 1.0
assert libm.fegetexcept() == 5, libm.fegetexcept()
print("alive", flush=True)
{}
print("still alive", flush=True)
"""


def test_a_nan_may_be_compared_inside_and_the_traps_are_set_again():
    ended = subprocess.run([sys.executable, "-c", PROGRAM.format("")], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["alive", "still", "alive"]


def test_without_it_the_process_ends():
    ended = subprocess.run([sys.executable, "-c", PROGRAM.format("nan < 1.0")], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.split()) == (-8, ["alive"])
