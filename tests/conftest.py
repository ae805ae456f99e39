"""Two workers with two threads each would wait for one another: every test process, and what it starts, uses one thread."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# One browser for all tests of a process: a second driver would not start.
from browser import chromium  # noqa: F401
