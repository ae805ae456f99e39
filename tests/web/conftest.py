"""One browser for all tests of this folder: a second driver would not start."""

from browser import chromium  # noqa: F401
