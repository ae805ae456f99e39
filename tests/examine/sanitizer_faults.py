"""All planted faults, by name."""

from __future__ import annotations

from examine import (
    sanitizer_faults_apart,
    sanitizer_faults_loop,
    sanitizer_faults_more,
    sanitizer_faults_range,
    sanitizer_faults_rounding,
)
from examine.sanitizer_programs import FAULTS, Program

FAMILIES = (
    sanitizer_faults_range,
    sanitizer_faults_rounding,
    sanitizer_faults_loop,
    sanitizer_faults_more,
    sanitizer_faults_apart,
)

__all__ = ["FAMILIES", "FAULTS", "Program"]
