"""All planted faults, by name."""

from __future__ import annotations

import sanitizer_faults_apart
import sanitizer_faults_loop
import sanitizer_faults_more
import sanitizer_faults_range
import sanitizer_faults_rounding
from sanitizer_programs import FAULTS, Program

FAMILIES = (
    sanitizer_faults_range,
    sanitizer_faults_rounding,
    sanitizer_faults_loop,
    sanitizer_faults_more,
    sanitizer_faults_apart,
)

__all__ = ["FAMILIES", "FAULTS", "Program"]
