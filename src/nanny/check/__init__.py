"""Finds mixed-precision mistakes in source code, before the first GPU hour: `nanny check PATH`. Never imports torch."""

from .engine import check_project, check_source
from .interpreter.trace import Options
from .registry import CheckRule, all_rules, rule

__all__ = ["CheckRule", "Options", "all_rules", "check_project", "check_source", "rule"]
