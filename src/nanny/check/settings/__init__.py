"""Settings files of DeepSpeed, Accelerate, Trainer and Lightning: their sections, and rules on them."""

from .check import check_settings

__all__ = ["check_settings"]
