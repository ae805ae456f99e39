"""Two workers with two threads each would wait for one another: every test process, and what it starts, uses one thread."""

import os
import signal

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# Who starts the tests in the background leaves Ctrl-C ignored, and the programs that tests stop with it would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# On a machine that others use, drawing an example may take long: that says nothing about the code under test.
settings.register_profile("shared machine", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("shared machine")

# One browser for all tests of a process: a second driver would not start.
from browser import chromium  # noqa: E402, F401
