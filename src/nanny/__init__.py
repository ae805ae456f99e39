"""nanny: says what goes wrong numerically in a mixed-precision PyTorch run, where, why, and what to change.

Names are resolved when they are first used: `import nanny` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Finding": "records",
    "NannyError": "records",
    "NannyWarning": "records",
    "Severity": "records",
    "analyze_tensor": "tensor",
    "auto_diff": "diff",
    "DiffReport": "diff",
    "TensorReport": "tensor",
    "MixedPrecisionNanny": "monitor",
    "watch_model": "model_watch",
    "check_loss_scale": "scale_check",
    "check_policy_mismatch": "policy_mismatch",
    "diagnose": "diagnose",
    "examine": "diagnose",
    "Diagnosis": "diagnosis_records",
    "check_model": "check.files",
    "CompareWithCPU": "ops",
    "NanInfTracker": "ops",
    "ModuleInfo": "ops",
    "open_module_tracker": "ops",
    "compare_for_single_op": "replay",
    "nan_inf_track_for_single_op": "replay",
    "sanitize": "sanitize_step",
}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'nanny' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"nanny.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
